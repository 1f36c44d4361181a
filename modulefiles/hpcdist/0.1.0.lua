-- hpcdist for Lmod. Beside it lies the same for Environment Modules. This file's name is the version.
--
-- Everything is found from where this file lies, in a clone or in an installed package. A site that copies it elsewhere
-- sets `home`, the folder that holds the package hpcdist, and `bin`, that of the command hpcdist.

local function parent(path)
    return (path:gsub("/+[^/]*$", ""))
end

local version = myModuleVersion()
local home = parent(parent(parent(myFileName())))
local bin = pathJoin(home, ".venv/bin")
if home:match("/batch$") then
    home = parent(parent(home))
    bin = pathJoin(parent(parent(parent(home))), "bin")
end

help("hpcdist " .. version .. ": MPI-native distributed training.\n" ..
    "Load the site's MPI first. Then: hpcdist doctor, hpcdist submit --help.")
whatis("hpcdist " .. version .. ": MPI-native distributed training (numpy or cupy, mpi4py, HDF5, Slurm)")
conflict("hpcdist")

setenv("HPCDIST_ROOT", home)
if isFile(pathJoin(bin, "hpcdist")) then
    -- The Python there finds the package by itself.
    prepend_path("PATH", bin)
else
    -- A clone that is not installed, or `pip install --target`: your Python has to be told.
    prepend_path("PYTHONPATH", home)
    if isFile(pathJoin(home, "bin/hpcdist")) then
        prepend_path("PATH", pathJoin(home, "bin"))
    end
end
