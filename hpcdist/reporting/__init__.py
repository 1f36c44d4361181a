"""Small files, and formatting of values, tables and host names, for all of hpcdist. All functions are local.

Floor 0: imports only errors and the standard library, and matplotlib and Jinja late. Nothing here depends on ranks,
runs or formats. Begin with `atomic.write`, which replaces a file, and `regular.read`, which reads a small one.
"""
