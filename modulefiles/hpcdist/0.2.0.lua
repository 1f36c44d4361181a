-- hpcdist for Lmod. The Tcl file in this folder is for Environment Modules. The name of this file is the version.
-- Rendered by `hpcdist site modulefile` from hpcdist.toml. The next rendering overwrites changes made here.

local version = myModuleVersion()
local about = "MPI-native distributed training"

help("hpcdist " .. version .. ": " .. about .. ".\n" ..
    [[
Load the MPI that mpi4py was built for first, unless hpcdist was installed with one.
Try: hpcdist doctor, hpcdist run -n 2 train, hpcdist submit --help.
HPCDIST_ROOT is the folder that holds the Python package.]])
whatis("Name: hpcdist")
whatis("Version: " .. version)
whatis("Description: " .. about)
whatis("Category: tools, machine learning")
whatis("Keywords: MPI, deep learning, HDF5, Slurm")
conflict("hpcdist")

-- All paths are relative to this file, in a clone or in an installed package. `home` contains the package hpcdist, `bin`
-- the command.
local function parent(path)
    return (path:gsub("/+[^/]*$", ""))
end

local home = parent(parent(parent(myFileName())))
local bin = pathJoin(home, ".venv/bin")
if home:match("/batch$") then
    home = parent(parent(home))
    bin = pathJoin(parent(parent(parent(home))), "bin")
end
local package_file = pathJoin(home, "hpcdist/__init__.py")
if mode() == "load" and not isFile(package_file) then
    LmodError("hpcdist " .. version .. ": " .. package_file .. " is missing, and this modulefile looks nowhere else; " ..
        "write one that may lie anywhere: hpcdist site modulefile --prefix DIR")
end

-- At unload, pushenv restores the previous value.
pushenv("HPCDIST_ROOT", home)

if not isFile(pathJoin(bin, "hpcdist")) then
    -- A clone that is not installed, or `pip install --target`: Python needs the path.
    prepend_path("PYTHONPATH", home)
    bin = pathJoin(home, "bin")
end
local path = pathJoin(home, "hpcdist/libexec") -- only the command: no python3, pip or mpirun
if isFile(pathJoin(bin, "hpcdist")) then
    prepend_path("PATH", path)
end

-- Lmod can undo a completion since 8.6. Older versions have no `complete`.
if myShellName() == "bash" and complete then
    set_shell_function("_hpcdist_completion", [[
    local IFS=$'\n' answer line
    answer=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" _HPCDIST_COMPLETE=bash_complete "$1" 2>/dev/null)
    COMPREPLY=()
    while read -r line; do
        case "$line" in
            (dir,*) compopt -o dirnames ;;
            (file,*) compopt -o default ;;
            (plain,*) COMPREPLY+=("${line#plain,}") ;;
        esac
    done <<<"$answer"
]], "")
    complete("bash", "hpcdist", "-F _hpcdist_completion")
end
