"""Small files, and formatting of values, tables and host names, for all of hpcdist. All functions are local.

Floor 0: imports only errors and the standard library, and matplotlib and Jinja late. Begin with `atomic.write` and
`regular.read`.
"""
