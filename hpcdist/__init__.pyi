from hpcdist import checkpoint as checkpoint
from hpcdist import energy as energy
from hpcdist.collectives.arrays import all_gather as all_gather
from hpcdist.collectives.arrays import all_to_all as all_to_all
from hpcdist.collectives.arrays import allreduce as allreduce
from hpcdist.collectives.arrays import broadcast as broadcast
from hpcdist.collectives.arrays import reduce_scatter as reduce_scatter
from hpcdist.comm.mpi.world import World as World
from hpcdist.comm.mpi.world import init as init
from hpcdist.comm.mpi.world import session as session
from hpcdist.training.run.stop_requests import should_stop as should_stop
from hpcdist.training.script import Training as Training
from hpcdist.training.use_cases.plan import plan as plan

__version__: str
__all__: list[str]
