"""Reading and writing of small files, and formatting of values, tables and host names, for all of hpcdist.

Floor 0: imports errors only, and nothing outside the standard library but matplotlib and Jinja, late. Nothing here
depends on ranks, runs or formats. `atomic` and `regular` write and read files, `user_cache` keeps measurements for
later starts; `units`, `hostlist` and `table` format numbers, names and rows for reports, `jsonable` and `toml_text`
values for programs; `nearest` suggests a known name for a misspelt one, `template` fills Jinja templates, `machine`
names the CPU and versions of packages, `plotting` saves pictures and draws Gantt charts, `rules` refuses settings that
do not go together.
Begin with `atomic.write`, which replaces a file, and `regular.read`, which reads a small one.
"""
