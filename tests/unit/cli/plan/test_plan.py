"""`hpcdist plan` on a login node: without MPI and GPU, answers in words, JSON and pictures, refusals with codes."""

import json
import shlex
from dataclasses import replace

import click
import pytest

import hpcdist as toolkit
from harness import jobs
from harness.jobs import called
from harness.marks import cases
from hpcdist.cli.plan import group
from hpcdist.cli.plan.options import SEARCH_AXES
from hpcdist.cli.plan.search import RUNNABLE_ALONE, WITH_OTHERS
from hpcdist.errors import UsageError
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.search.space import SearchSpec
from hpcdist.training.use_cases import plan as use_case

ABSENT = ("mpi4py", "cupy", "numba", "pynvml", "torch")
GPT = ["--layers", "4", "--hidden", "256", "--heads", "4", "--vocabulary", "1000", "--context", "128", "--batch", "32"]
NAMED = ["--model", "gpt2", "--batch", "64"]
ON = ["--cluster", "a100-selene"]


def hpcdist(capsys, *arguments):
    """Run the command here; return its exit code and what it said."""
    return called(capsys, *arguments)


@pytest.fixture
def run(capsys):
    return lambda *arguments: hpcdist(capsys, "plan", *map(str, arguments))


@pytest.fixture
def planned(run):
    """Return a function that plans, and returns what --json says."""

    def of(*arguments, expected=0):
        code, out, err = run(*arguments, "--json")
        assert expected is None or code == expected, err
        return json.loads(out)

    return of


@pytest.fixture
def recipe(tmp_path):
    """Return a function that writes a recipe."""

    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


RECIPE = """
[model]
layers = 4
hidden = 64
heads = 4
[data]
context = 64
[run]
steps = 50
global_batch = 16
"""


def in_a_child(code):
    """Run ``code`` after a function ``run(*words)``, which asserts that the command ends well."""
    before = (
        "import sys\nfrom hpcdist.cli.main import main\ndef run(*words):\n    try:\n        main(['plan', *words])\n"
        "    except SystemExit as leaving:\n        assert not leaving.code, (words, leaving.code)\n"
    )
    done = jobs.python(before + code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_works_where_nothing_heavy_can_be_imported(recipe):
    path = str(recipe(RECIPE))
    cut = ["--set", "parallel.pipeline=2", "--set", "parallel.microbatches=4"]
    commands = [
        [*GPT, *ON, "--data", "4", "--zero", "1"],
        [*GPT, "--cluster", "workstation", "--precision", "float32", "--json"],
        ["search", *GPT, *ON, "--devices", "8", "--first", "2", "--pipeline", "2"],
        ["compare", *GPT, *ON, "--layout", "tensor=2", "--layout", "zero=2,data=2"],
        ["clusters"],
        ["models"],
        [path, "--cluster", "workstation", *cut, "--explain"],
        [path, "--cluster", "workstation", "--set", "model.kind=mlp", "--set", "model.heads=4"],
    ]
    forbidden = f"for name in {ABSENT!r}:\n    sys.modules[name] = None\n"
    shown = in_a_child(forbidden + "".join(f"run(*{words!r})\n" for words in commands))
    assert shown.count("closed forms: the simulator cannot be loaded") == 2


def test_help_is_instant():
    names = ("search", "compare", "clusters", "models", "calibrate", "--calibrate")
    helps = "".join(f"run(*{words!r})\n" for words in [["--help"], *([name, "--help"] for name in names)])
    loaded = "[name for name in ('numpy', 'mpi4py', 'h5py', 'msgspec', 'numba') if name in sys.modules]"
    assert in_a_child(f"{helps}print('loaded:', *{loaded})").splitlines()[-1].strip() == "loaded:"


@pytest.mark.parametrize("name", [None, *group.COMMANDS])
def test_every_option_explains_itself(name):
    context = click.Context(group.command)
    command = group.command if name is None else group.command.get_command(context, name)
    assert command is not None and command.help
    assert not [one.name for one in command.params if isinstance(one, click.Option) and not one.help]


def test_the_help_of_a_command_names_it(run):
    code, out, _ = run("search", "--help")
    assert code == 0 and out.startswith("Usage: hpcdist plan search [OPTIONS] [RECIPE]")
    code, out, _ = run("--help")
    assert code == 0 and out.startswith("Usage: hpcdist plan [OPTIONS] [RECIPE]") and "\n  compare " in out


def test_the_help_of_a_search_says_what_varies():
    search, plain = (
        {one.name: one.help for one in command.params if isinstance(one, click.Option)}
        for command in (group.command.get_command(click.Context(group.command), "search"), group.command)
    )
    varied = {name for name, axis in SEARCH_AXES.items() if len(getattr(SearchSpec(), axis)) != 1}
    told = {name for name, text in search.items() if text.endswith("  [default: varied]")}
    assert told == varied | {"strategy", "zero"} and "varied" not in " ".join(plain.values())
    assert search["devices"].endswith("[default: all of the cluster]")
    assert plain["devices"].endswith("[default: as the degrees need]") and plain["pipeline"].endswith("[default: 1]")


@cases("written, tokens", ("32K", 32768), ("1m", 1 << 20), ("4096", 4096))
def test_a_context_may_have_a_unit(written, tokens, planned):
    found = planned("--model", "gpt2", "--batch", 1, *ON, "--context", written, "--context-ranks", 8, expected=None)
    assert found["tokens"] == tokens


def test_the_options_are_those_of_the_public_function():
    """Which knows every field of a layout, and of a transformer."""
    apart = {"recipe", "overrides", "cluster", "explain", "plot", "as_json"}
    assert {one.name for one in group.command.params} - apart == set(use_case.OPTIONS)


def test_the_public_function_returns_what_json_prints_and_needs_no_click(planned, recipe):
    words = (recipe(RECIPE), "--set", "model.layers=2", *ON, "--devices", 2, "--batch", 8, "--zero", 1)
    keys = {"model.layers": 2}
    assert toolkit.plan(words[0], keys=keys, cluster=ON[1], devices=2, batch=8, zero=1) == planned(*words)
    with pytest.raises(UsageError, match="plan has no option 'tensr'; did you mean 'tensor'"):
        toolkit.plan(cluster=ON[1], tensr=2)
    code = "import sys, hpcdist; hpcdist.plan; print({'click', 'mpi4py'} & set(sys.modules))"
    assert jobs.python(code).stdout == "set()\n"


def test_the_layout_of_the_options_is_planned(planned):
    found = planned(
        *(*GPT, *ON, "--pipeline", "2", "--tensor", "2", "--devices", "16", "--zero", "1", "--microbatch", "2"),
        *("--schedule", "gpipe", "--sequence-parallel", "--recompute", "full", "--compression", "int8"),
        *("--main-gradients", "working", "--implementation", "megatron", "--overlap", "0.5", "--algorithm", "ring"),
        *("--activations", "float32", "--optimizer-slots", "1", "--steps", "7", "--library", "mpi"),
        *("--no-gradient-fusion", "--tensor-overlap", "0.25"),
    )
    layout = found["layout"]
    expected = {
        "data": 4,
        "pipeline": 2,
        "tensor": 2,
        "strategy": "zero1",
        "microbatch": 2,
        "microbatches": 4,
        "schedule": "gpipe",
        "sequence_parallel": True,
        "recompute": "full",
        "compression": "int8",
        "main_gradients": "working",
        "implementation": "megatron",
        "overlap": 0.5,
        "algorithm": "ring",
        "activations": "float32",
        "optimizer_slots": 1,
        "library": "mpi",
        "gradient_fusion": False,
        "tensor_overlap": 0.25,
        "devices": 16,
        "chunks": 1,
    }
    assert {name: layout[name] for name in expected} == expected
    assert found["run"]["steps"] == 7 and found["global_batch"] == 32
    assert found["memory"]["bytes"] == pytest.approx(sum(found["memory"]["terms"].values()))
    assert found["step_s"] == pytest.approx(sum(found["timing"]["terms"].values()))
    assert found["hfu"] > found["mfu"] > 0


def test_every_number_of_a_model_counts(planned):
    base = planned(*GPT, *ON)["parameters"]
    hidden, layers, words = 256, 4, 1000
    assert planned(*GPT, *ON, "--untied")["parameters"] == base + hidden * words
    assert planned(*GPT, *ON, "--feed-forward", 512)["parameters"] < base
    assert planned(*GPT, *ON, "--mlp-ratio", 2)["parameters"] == planned(*GPT, *ON, "--feed-forward", 512)["parameters"]
    assert planned(*GPT, *ON, "--mlp-ratio", 4)["parameters"] == base
    assert planned(*GPT, *ON, "--kv-heads", 1)["parameters"] < base
    assert planned(*GPT, *ON, "--gated", "--feed-forward", 1024)["parameters"] > base
    assert planned(*GPT, *ON, "--no-bias")["parameters"] < base
    assert planned(*GPT, *ON, "--positions", "rotary")["parameters"] == base - 128 * hidden
    assert planned(*GPT, *ON, "--norm", "rms")["parameters"] == base - (2 * layers + 1) * hidden
    assert planned(*GPT, *ON, "--experts", 4, "--experts-per-token", 2)["parameters"] > 2.5 * (base - words * hidden)
    assert planned(*(word if word != "128" else "256" for word in GPT), *ON)["tokens"] == 2 * 32 * 128
    assert planned(*GPT, *ON, "--no-causal")["parameters"] == base


def test_a_model_by_name(planned):
    found = planned(*NAMED, *ON, "--tokens", 64 * 1024 * 10 + 1)
    assert found["model"] == "gpt2" and found["parameters"] == 124_439_808
    assert found["run"]["steps"] == 11
    assert planned(*NAMED, *ON, "--context", 512)["tokens"] == 64 * 512


def test_a_recipe_is_planned_as_it_would_run(planned, recipe):
    path = recipe(RECIPE)
    found = planned(path, "--cluster", "workstation", "--devices", 2)
    assert found["model"] == "mine" and found["run"]["steps"] == 50 and found["global_batch"] == 16
    layout = found["layout"]
    assert (layout["data"], layout["precision"], layout["overlap"], layout["optimizer_slots"]) == (2, "float32", 0.0, 2)
    assert (layout["microbatch"], layout["microbatches"]) == (8, 1)
    cut = planned(
        *(path, "--cluster", "workstation", "--set", "parallel.pipeline=2", "--set", "parallel.microbatches=4"),
        *("--set", "parallel.recompute=true", "--set", "optimizer.name=sgd", "--set", "optimizer.momentum=0.0"),
    )["layout"]
    assert (cut["pipeline"], cut["microbatch"], cut["schedule"], cut["recompute"]) == (2, 4, "1f1b", "full")
    assert cut["optimizer_slots"] == 0
    half = planned(path, *ON, "--set", "precision.mode=bfloat16", "--set", "communication.overlap=thread")["layout"]
    assert planned(path, *ON, "--pipeline", 2, "--schedule", "zb-v")["layout"]["chunks"] == 2
    assert (half["precision"], half["activations"], half["overlap"]) == ("bfloat16", "float32", 1.0)


def test_without_a_recipe_the_default_one_is_planned(planned, recipe):
    found = planned("--cluster", "workstation", "--devices", 2)
    written = planned(recipe("", "empty.toml"), "--cluster", "workstation", "--devices", 2)
    assert found["model"] == "the default recipe" and written["model"] == "empty"
    assert found | {"model": ""} == written | {"model": ""}
    assert planned("compare", "--cluster", "workstation", "--layout", "data=1", "--layout", "data=2")[1]["step_s"] > 0


def test_options_take_the_place_of_what_a_recipe_says(planned, recipe):
    found = planned(recipe(RECIPE), *ON, "--tensor", 2, "--batch", 8, "--zero", 3, "--data", 2, "--steps", 5)
    layout = found["layout"]
    assert (layout["tensor"], layout["data"], layout["strategy"], layout["microbatch"]) == (2, 2, "zero3", 4)
    assert found["global_batch"] == 8 and found["run"]["steps"] == 5


def test_parameter_servers_of_a_recipe(planned, recipe):
    path = recipe(RECIPE + "[parallel]\nstrategy = 'parameter_server'\n[parameter_server]\nservers = 2\n")
    layout = planned(path, *ON, "--devices", 6)["layout"]
    assert (layout["servers"], layout["data"], layout["devices"]) == (2, 4, 6)
    colocated = planned(path, *ON, "--devices", 6, "--set", "parameter_server.placement=colocated")
    assert (colocated["layout"]["servers"], colocated["layout"]["data"]) == (0, 6)
    assert any("every rank served" in flag for flag in colocated["flags"])


@cases(
    "key, said",
    ("communication.compression=qsgd", "planned as int8"),
    ("communication.algorithm=circulant", "planned as the fastest"),
    ("run.logical_shards=4", "fixed orders of sums"),
    ("parallel.strategy=zero1", "one is planned"),
    ("run.batch_warmup=[96, 8]", "run.batch_warmup"),
)
def test_what_a_plan_leaves_out_of_a_recipe_is_told(key, said, planned, recipe):
    assert said in " ".join(planned(recipe(RECIPE), *ON, "--set", key)["flags"])


def test_attention_of_packed_documents_is_planned_within_them(planned, recipe, tmp_path):
    """Without data to measure them it is that of whole contexts, and a note says so."""
    keys = [f"--set={key}" for key in ("data.context=512", "data.packed=true", "data.document_end=10")]
    keys.append("--set=data.validation_fraction=0")
    path = recipe(RECIPE)
    (tmp_path / "lines.txt").write_text("a line of 32 bytes, with its end\n" * 800)  # 32 places each, 16 a sample
    within = planned(path, *ON, *keys, f"--set=data.path={tmp_path / 'lines.txt'}")
    whole = planned(path, *ON, *keys, f"--set=data.path={tmp_path / 'none'}")
    assert whole["step_s"] == planned(path, *ON, keys[0])["step_s"] > within["step_s"]
    assert within["memory"] == whole["memory"]
    assert f"have {33 / 513:.1%} of the pairs of tokens of whole contexts" in " ".join(within["flags"])
    assert "the most that it can be" in " ".join(whole["flags"])


@cases(
    "more, told",
    ([], True),
    (["--devices", 2], False),
    (["--set", "parallel.data=2"], False),
)
def test_words_tell_that_one_replica_is_planned_beside_the_layout(more, told, run, recipe):
    code, out, _ = run(recipe(RECIPE), *ON, *more, "--explain")
    layout = " ".join(out[out.index("\nlayout ") : out.index("\nmemory ")].split())
    assert code == 0 and ("--devices N plans for N" in layout) == told
    assert out.count("one is planned") == told


def test_a_model_in_numbers_is_planned_on_one_replica(planned):
    assert any("one is planned" in flag for flag in planned(*GPT, *ON)["flags"])
    assert not any("one is planned" in flag for flag in planned(*GPT, *ON, "--data", 2)["flags"])


@cases(
    "more, gains",
    (["--precision", "bfloat16", "--activations", "float32"], False),
    (["--precision", "bfloat16", "--activations", "working"], True),
    (["--precision", "float32"], True),
)
def test_16_bits_with_activations_in_float32_gain_nothing(more, gains, planned):
    flags = planned(*GPT, *ON, *more)["flags"]
    assert any("products are of float32 numbers" in flag for flag in flags) != gains


def test_words_tell_what_is_assumed(run, recipe):
    code, out, _ = run(recipe(RECIPE), *ON, "--explain")
    assert code == 0
    assert "rule: 16 bytes a parameter" in out and "MFU" in out and "HFU" in out and "GiB" in out
    assert "assumption" in out
    told = [line for line in out.splitlines() if "the time of a restart is an assumption" in line]
    assert len(told) <= 1


def test_flags_are_told_once_and_decisive_first(run, planned):
    arguments = ["--model", "gpt3-175b", "--batch", "65", "--data", "64", "--tensor-overlap", "0.5", *ON]
    flags = planned(*arguments, expected=1)["flags"]
    assert flags[0].startswith("it does not fit") and flags[-1].startswith("assumed in the file of a100-selene")
    assert "65 samples on 64 replicas: 1 computes 2 micro-batches while the others, with 1, wait" in flags
    assert "tensor_overlap = 0.5 has no effect with one tensor device" in flags
    assert any("attention_share" in one for one in planned(*arguments, expected=1)["assumptions"])
    _, out, _ = run("search", *GPT, *ON, "--devices", "16", "--first", "3")
    told = [line for line in out.splitlines() if line.startswith("note: ")]
    assert len(told) == len(set(told)) and told[-1].startswith("note: assumed in the file")
    assert sum("messages that hide" in line for line in told) <= 1


def test_what_does_not_fit_is_an_answer(run, planned):
    arguments = ["--model", "gpt3-175b", "--batch", "8", *ON]
    code, out, _ = run(*arguments)
    assert code == 1 and "DOES NOT FIT" in out
    assert planned(*arguments, expected=1)["memory"]["fits"] is False
    each = ["compare", *arguments, "--layout", "zero=1"]
    assert run(*each, "--layout", "zero=2")[0] == 1
    assert run(*each, "--layout", "tensor=8,pipeline=8,recompute=full")[0] == 0


@cases(
    "arguments, code, said",
    ([*GPT], 2, "give --cluster NAME|FILE: a100-selene"),
    ([*GPT, "--cluster", "a100-selen"], 78, "the nearest is 'a100-selene'"),
    (["--model", "gpt2-xll", "--batch", "8", *ON], 78, "gpt2-xl"),
    (["--model", "gpt2", *ON], 2, "give --batch"),
    (["--layers", "4", *ON, "--batch", "4"], 2, "--hidden, --heads, --vocabulary, --context"),
    ([*NAMED, *ON, "--layers", "3"], 2, "--model gpt2 and --layers"),
    ([*NAMED, *ON, "--set", "run.steps=3"], 2, "--set run.steps=3 changes a recipe"),
    ([*GPT, *ON, "--feed-forward", "512", "--mlp-ratio", "2"], 2, "--feed-forward and --mlp-ratio"),
    ([*GPT, *ON, "--mlp-ratio", "1.001"], 2, "no whole width"),
    ([*GPT, *ON, "--mlp-ratio", "inf"], 2, "inf is no finite number"),
    ([*GPT, *ON, "--mlp-ratio", "nan"], 2, "nan is no finite number"),
    ([*GPT, *ON, "--tokens", "nan"], 2, "nan is no finite number"),
    ([*GPT, *ON, "--tokens", "inf"], 2, "inf is no finite number"),
    ([*GPT, *ON, "--tokens", "1e300"], 2, "at most 1,000,000,000,000 steps"),
    ([*GPT, *ON, "--steps", "9" * 30], 2, "at most 1,000,000,000,000 steps"),
    ([*GPT, *ON, "--overlap", "nan"], 2, "nan is no finite number"),
    ([*GPT, *ON, "--tensor-overlap", "nan"], 2, "nan is no finite number"),
    ([*GPT, *ON, "--experts-per-token", "2"], 2, "needs --experts"),
    ([*GPT, *ON, "--steps", "3", "--tokens", "1e6"], 2, "--steps 3 and --tokens 1e+06"),
    ([*GPT, *ON, "--zero", "2", "--strategy", "allreduce"], 2, "--zero 2 is --strategy zero2"),
    ([*GPT, *ON, "--servers", "2", "--zero", "1"], 2, "--servers 2 is for --strategy parameter_server"),
    ([*GPT, *ON, "--schedule", "zb-h1"], 2, "--schedule zb-h1 with one pipeline device"),
    ([*GPT, *ON, "--chunks", "2"], 2, "--chunks 2 with one pipeline device"),
    ([*GPT, *ON, "--pipeline", "2", "--schedule", "interleaved"], 2, "needs --chunks"),
    ([*GPT, *ON, "--pipeline", "2", "--schedule", "zb-v", "--chunks", "3"], 2, "which has 2"),
    ([*GPT, *ON, "--sequence-parallel"], 2, "cuts nothing"),
    ([*GPT, *ON, "--main-gradients", "working"], 2, "is of --implementation megatron"),
    (
        [*GPT, *ON, "--main-gradients", "working", "--implementation", "megatron", "--precision", "float32"],
        2,
        "--main-gradients working has no effect with the precision float32",
    ),
    ([*GPT, *ON, "--no-gradient-fusion"], 2, "is of --implementation megatron"),
    ([*GPT, *ON, "--activations", "float32", "--precision", "float32"], 2, "no effect with the precision float32"),
    ([*GPT, *ON, "--devices", "7", "--tensor", "2"], 2, "data ? x pipeline 1 x tensor 2 x context 1"),
    ([*GPT, *ON, "--devices", "8", "--tensor", "2", "--data", "2"], 2, "the nearest that it makes is 4"),
    ([*GPT, *ON, "--tensor", "3"], 78, "tensor = 3"),
    ([*GPT, *ON, "--data", "64"], 78, "a global batch of 32"),
    ([*GPT, *ON, "--pipeline", "2", "--schedule", "zb-h1", "--recompute", "full"], 78, "recompute"),
    ([*GPT, "--cluster", "workstation", "--data", "4"], 78, "2 more than the 2 of workstation"),
    ([*GPT, *ON, "--precision", "int8"], 2, "int8"),
    ([*GPT, *ON, "--context", "32KB"], 2, "'32KB' is no number of tokens such as 4096, 16K or 1M"),
    ([*GPT, *ON, "--context", "0"], 2, "'0' is no number of tokens"),
    ([*GPT, *ON, "--plot", "plan.xls"], 2, "choose an ending from"),
    ([*GPT, *ON, "--plot", "/nowhere/plan.png"], 74, "/nowhere is no directory"),
    (["no-such-recipe.toml", *ON], 74, "recipe no-such-recipe.toml: there is no such file"),
    ([*GPT, "--cluster", "no-such-cluster.toml"], 74, "the cluster no-such-cluster.toml: there is no such file"),
    (["serch", *ON], 2, "did you mean `hpcdist plan search`?"),
    (["comapre", *ON], 2, "did you mean `hpcdist plan compare`?"),
    (["--no-such-option"], 2, "--no-such-option"),
)
def test_refusals(arguments, code, said, run):
    found, out, err = run(*arguments)
    assert (found, out) == (code, ""), err
    assert said in err and "Traceback" not in err


def test_a_recipe_and_a_name_are_two_models(run, recipe):
    code, _, err = run(recipe(RECIPE), *NAMED, *ON)
    assert code == 2 and "are two models" in err


@cases(
    "text, said",
    ("[model]\nkind = 'import'\nfactory = 'a:b'\n", "only the code that makes it knows"),
    ("[parallel]\nstrategy = 'gossip'\n", "'gossip' cannot be planned"),
    ("[model]\nkind = 'convnet'\n[data]\npath = 'none.h5'\n", "there is no such file"),
)
def test_recipes_that_cannot_be_described(text, said, run, recipe):
    code, _, err = run(recipe(text), *ON)
    assert code == 78 and said in err


def test_pictures(run, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    code, _, err = run(*GPT, *ON, "--pipeline", "2", "--microbatch", "4", "--plot", file)
    assert code == 0, err
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_cluster_of_ones_own(run, planned, tmp_path):
    own = replace(toml_file.read("a100-selene"), name="mine", devices=16)
    path = tmp_path / "mine.toml"
    path.write_text(toml_file.dump(own))
    assert planned(*GPT, "--cluster", path)["cluster"] == "mine"
    code, _, err = run(*GPT, "--cluster", path, "--data", "32")
    assert code == 78 and "16 more than the 16 of mine" in err
    code, out, _ = run("clusters", path)
    assert code == 0 and out == path.read_text()
    path.write_text(path.read_text().replace("devices = 16", "devises = 16"))
    code, _, err = run("clusters", path)
    assert code == 78 and "devises" in err and str(path) in err


def test_lists(run):
    code, out, _ = run("clusters")
    assert code == 0 and all(f"{name} " in out for name in toml_file.names())
    code, out, _ = run("models", "--json")
    assert code == 0 and json.loads(out)["gpt2"]["parameters"] == 124_439_808
    code, out, _ = run("models", "gpt2")
    assert code == 0 and "layers = 12\n" in out
    code, out, _ = run("models", "gtp2")
    assert code == 78


def test_a_search_explains_what_it_finds(run, planned, tmp_path):
    arguments = ["search", *GPT, *ON, "--devices", "16", "--first", "3"]
    found = planned(*arguments)
    assert len(found["found"]) == 3
    steps = [one["step_s"] for one in found["found"]]
    assert steps == sorted(steps)
    assert all(one["layout"]["devices"] == 16 for one in found["found"])
    code, out, err = run(*arguments)
    assert code == 0, err
    assert "least time among" in out and "\n 1  " in out and "\n 3  " in out and "refused" in out
    assert f"row 1 in full: {found['again']}\n" in out


PIPELINES = "[parallel]\npipeline = 2\nmicrobatches = 4\nrecompute = true\n"
SERVED = "[parallel]\nstrategy = 'parameter_server'\n[parameter_server]\nservers = 2\n"


@cases(
    "arguments, text",
    ([*GPT, *ON, "--devices", "16"], None),
    ([*GPT, *ON, "--devices", "16", "--pipeline", "2", "--schedule", "zb-v"], None),
    ([*GPT, *ON, "--devices", "16", "--pipeline", "2", "--no-simulate", "--untied", "--kv-heads", "2"], None),
    ([*GPT, *ON, "--devices", "16", "--pipeline", "2", "--schedule", "interleaved", "--chunks", "2"], None),
    ([*NAMED, *ON, "--devices", "12", "--zero", "3", "--objective", "energy", "--implementation", "megatron"], None),
    ([*NAMED, *ON, "--devices", "8", "--tensor", "4", "--sequence-parallel", "--overlap", "0.5"], None),
    ([*NAMED, *ON, "--devices", "8", "--context-ranks", "2", "--tokens", "1e9", "--memory", "60 GB"], None),
    ([*NAMED, *ON, "--devices", "8", "--compression", "int8", "--precision", "float32"], None),
    ([*ON, "--devices", "4"], RECIPE),
    ([*ON, "--devices", "4", "--set", "model.layers=6", "--set", "parallel.sequence_parallel=false"], RECIPE),
    ([*ON, "--devices", "4", "--pipeline", "1"], RECIPE + PIPELINES),
    ([*ON, "--devices", "8", "--pipeline", "2", "--recompute", "none"], RECIPE + PIPELINES),
    ([*ON, "--devices", "8", "--strategy", "parameter_server"], RECIPE + SERVED),
)
def test_the_best_layout_can_be_planned_again(arguments, text, planned, recipe):
    path = [] if text is None else [recipe(text, "with a space.toml")]
    found = planned("search", *path, *arguments, "--first", "2")
    best, words = found["found"][0], shlex.split(found["again"])
    assert words[:2] == ["hpcdist", "plan"]
    again = planned(*words[2:])
    idle = {"schedule": "", "chunks": 1} if best["layout"]["pipeline"] == 1 else {}
    assert again["layout"] | idle == best["layout"] | idle
    for name in ("step_s", "memory", "timing", "run", "energy", "parameters", "global_batch", "cluster"):
        assert again[name] == best[name]


def test_a_search_says_which_devices_are_paid_for(planned):
    arguments = ["search", *GPT, *ON, "--first", "2", "--objective", "cost"]
    told = "energy and price are those of 2 nodes: of 16 devices there 4 are not used"
    assert told in planned(*arguments, "--devices", "12", "--implementation", "hpcdist")["flags"]
    assert not any("not used" in flag for flag in planned(*arguments, "--devices", "16")["flags"])


def test_what_is_given_does_not_vary_in_a_search(planned):
    found = planned(
        *("search", *GPT, *ON, "--devices", "16", "--tensor", "2", "--zero", "3", "--recompute", "full"),
        *("--precision", "float32", "--memory", "40 GB", "--objective", "energy", "--no-simulate", "--distinct"),
    )
    assert found["objective"] == "energy" and found["found"]
    for one in found["found"]:
        layout = one["layout"]
        assert (layout["tensor"], layout["recompute"], layout["precision"]) == (2, "full", "float32")
        assert layout["strategy"] == "zero3"
        assert one["memory"]["bytes"] <= 40e9
    values = [one["value"] for one in found["found"]]
    assert values == sorted(values)


def test_a_search_plans_for_all_devices_and_says_nothing_of_one_replica(planned, recipe):
    small = ["search", "--cluster", "workstation", "--first", "1"]
    for subject in ([*GPT, "--precision", "float32"], [recipe(RECIPE)]):
        assert planned(*small, *subject)["devices"] == 2
        for devices in ([], ["--devices", "2"]):
            assert not any("one is planned" in flag for flag in planned(*small, *subject, *devices)["flags"])


def test_a_recipe_keeps_what_a_search_does_not_vary(planned, recipe):
    found = planned("search", recipe(RECIPE), *ON, "--devices", "4", "--first", "2")
    layouts = [one["layout"] for one in found["found"]]
    assert {layout["precision"] for layout in layouts} == {"float32"}
    assert {layout["overlap"] for layout in layouts} == {0.0}
    assert {one["run"]["steps"] for one in found["found"]} == {50}


@cases(
    "arguments, code, said",
    (["--data", "2", "--devices", "4"], 2, "--data is what a search finds"),
    (["--devices", "4", "--memory", "80"], 2, "has no unit"),
    (["--devices", "4", "--memory", "80 Gb"], 2, "bits or bytes"),
    (["--devices", "4", "--memory", "inf GB"], 2, "has no number"),
    (["--devices", "4", "--memory", "1e400 GB"], 2, "no finite number"),
    (["--devices", "4", "--memory", "0 GB"], 2, "choose more than 0"),
    (["--devices", "4", "--memory", "900 GB"], 2, "is none of the 85,899,345,920 bytes"),
    (["--devices", "100000"], 2, "more than the"),
)
def test_searches_that_are_refused(arguments, code, said, run):
    found, out, err = run("search", *GPT, *ON, *arguments)
    assert (found, out) == (code, ""), err
    assert said in err


def test_nothing_fits(run):
    code, out, _ = run("search", "--model", "megatron-1t", "--batch", "8", *ON, "--devices", "8", "--first", "2")
    assert code == 1 and "no layout fits" in out


def test_a_comparison_is_a_line_a_plan(run, planned):
    arguments = ["compare", *GPT, *ON, "--cluster", "h100-hgx", "--layout", "tensor=2", "--layout", "data=4 zero=1"]
    found = planned(*arguments)
    assert [(one["cluster"], one["layout"]["tensor"], one["layout"]["data"]) for one in found] == [
        ("a100-selene", 2, 1),
        ("a100-selene", 1, 4),
        ("h100-hgx", 2, 1),
        ("h100-hgx", 1, 4),
    ]
    code, out, _ = run(*arguments)
    assert code == 0
    lines = [line for line in out.splitlines() if line[:7] in ("1  a100", "2  a100", "3  h100", "4  h100")]
    assert len(lines) == 4 and "zero1" in lines[1] and "4 against 1: " in out


def test_what_cannot_be_is_left_out_of_a_comparison(run, planned):
    arguments = ["compare", *GPT, *ON, "--layout", "tensor=3", "--layout", "tensor=2"]
    impossible, possible = planned(*arguments)
    assert "tensor = 3" in impossible["impossible"] and possible["impossible"] is None and possible["step_s"] > 0
    code, out, _ = run(*arguments)
    assert code == 0 and "left out: tensor=3 on a100-selene: this layout cannot be: tensor = 3" in out
    code, out, err = run("compare", *GPT, *ON, "--layout", "tensor=3", "--layout", "tensor=5")
    assert (code, out) == (78, "") and "tensor = 3" in err and "tensor = 5" in err


def test_what_holds_for_all_plans_is_said_once(run):
    code, out, _ = run("compare", *GPT, *ON, "--cluster", "h100-hgx")
    assert code == 0 and out.count("neither --steps nor --tokens is given") == 1
    assert (
        "note: row 1: assumed in the file of a100-selene" in out and "note: row 2: assumed in the file of h100" in out
    )


def test_a_layout_of_a_comparison_may_say_its_devices_and_batch(planned):
    found = planned("compare", *GPT, *ON, "--layout", "devices=4", "--layout", "devices=8,batch=64")
    assert [(one["layout"]["data"], one["global_batch"]) for one in found] == [(4, 32), (8, 64)]


@cases(
    "arguments, said",
    ([*ON, "--layout", "tensor=2"], "compares with nothing"),
    ([*ON, "--layout", "tensr=2", "--layout", "tensor=2"], "'--tensor'"),
    ([*ON, "--layout", "tensor=two", "--layout", "tensor=2"], "'two' is not a valid integer"),
    ([*ON, "--layout", "zero=1,strategy=zero2", "--layout", "tensor=2"], "--zero 1 is --strategy zero1"),
)
def test_comparisons_that_are_refused(arguments, said, run):
    code, out, err = run("compare", *GPT, *arguments)
    assert (code, out) == (2, "") and said in err


def test_names_are_completed():
    parameters = {one.name: one for one in group.command.params}
    context = click.Context(group.command)
    found = [item.value for item in parameters["cluster"].shell_complete(context, "a100")]
    assert found == ["a100-selene"]
    assert [item.value for item in parameters["recipe"].shell_complete(context, "cl")] == ["clusters", "cl"]
    assert "gpt2-xl" in [item.value for item in parameters["model"].shell_complete(context, "gpt2")]


SEVEN = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--vocabulary", "32000", "--context", "2048"]
SEVEN += ["--batch", "512", "--devices", "64", "--cluster", "h100-hgx"]
OURS = ["--implementation", "hpcdist"]


def test_an_mfu_that_nobody_has_measured_is_limited_and_said_first(run, planned):
    arguments = [*SEVEN, *OURS, "--zero", "1", "--microbatch", "4"]
    found = planned(*arguments)
    assert found["is_capped"] and found["mfu"] == pytest.approx(0.4644) and found["modelled_mfu"] > 0.6
    assert sum(found["timing"]["terms"].values()) == pytest.approx(found["step_s"])
    limited = "LIMITED: MFU is limited to 46.4%, the best published training on such"
    assert run(*arguments, "--explain")[1].startswith(limited)
    assert "MFU 46.4 %, limited to the best published" in run(*arguments)[1]
    table = ["--layout", "zero=1", "--layout", "tensor=8,microbatch=1"]
    assert run("compare", *SEVEN, *OURS, "--microbatch", "4", *table)[1].startswith("* MFU of row 1 limited to 46.4 %")
    _, out, _ = run("search", *SEVEN, *OURS, "--first", "2", "--no-simulate")
    assert out.startswith("* MFU of rows 1, 2 limited to 46.4 %") and "zero3" not in out.split("row 1 in full")[0]


def test_a_gpu_that_nobody_has_measured_is_planned_with_published_kernels(planned, recipe, tmp_path):
    arguments = [*SEVEN, "--zero", "1", "--recompute", "full"]
    found = planned(*arguments)
    assert found["layout"]["implementation"] == "megatron" and not found["is_capped"]
    assert planned(*arguments, *OURS)["layout"]["implementation"] == "hpcdist"
    text = toml_file.dump(replace(toml_file.read("h100-hgx"), calibrated="here, today"))
    (tmp_path / "own.toml").write_text(text)
    own = [*arguments[: arguments.index("h100-hgx")], tmp_path / "own.toml", *arguments[arguments.index("--zero") :]]
    assert planned(*own)["layout"]["implementation"] == "hpcdist"
    said = planned(recipe(RECIPE), "--cluster", "h100-hgx", "--devices", "4", "--precision", "bfloat16")
    assert (said["layout"]["implementation"], said["layout"]["library"]) == ("megatron", "mpi")
    assert any("this toolkit's unmeasured" in flag for flag in said["flags"])
    assert planned(recipe(RECIPE), "--cluster", "workstation")["layout"]["implementation"] == "hpcdist"


def test_a_search_of_runnable_layouts_keeps_the_implementation_and_finds_no_faster_layout(run, planned):
    arguments = ["search", *SEVEN, "--first", "1", "--no-simulate"]
    (best,), (runnable,) = (planned(*arguments, *more)["found"] for more in ([], ["--runnable"]))
    assert best["layout"]["implementation"] == runnable["layout"]["implementation"] == "megatron"
    assert runnable["step_s"] >= best["step_s"]
    assert "kernels and memory of megatron" in run(*arguments)[1].splitlines()[0]
    assert "kernels and memory of hpcdist" in run(*arguments, *OURS)[1].splitlines()[1]
    recomputed = [*arguments, "--recompute", "selective", "--runnable"]
    assert not planned(*recomputed, expected=1)["found"], "this version has no selective recomputation"


@pytest.mark.parametrize("runnable", [False, True])
def test_a_search_tells_whether_it_is_of_runnable_layouts_alone(run, runnable):
    arguments = ["search", *GPT, *ON, "--devices", "2", "--first", "1", "--no-simulate"]
    _, out, _ = run(*arguments, *(["--runnable"] if runnable else []))
    (note,) = [line for line in out.splitlines() if "--runnable" in line]
    assert note == f"note: {RUNNABLE_ALONE if runnable else WITH_OTHERS}"


def test_zero3_is_planned_with_the_median_of_its_known_errors(run, planned):
    arguments = [*SEVEN, "--microbatch", "1", "--zero", "3"]
    found = planned(*arguments)
    modelled_s = found["step_s"] - found["timing"]["terms"]["correction"]
    assert found["step_s"] == pytest.approx(1.5 * modelled_s) == sum(found["timing"]["terms"].values())
    assert found["step_range_s"] == pytest.approx([1.26 * modelled_s, 1.92 * modelled_s])
    assert found["run"]["work_s"] == pytest.approx(found["run"]["steps"] * found["step_s"])
    assert found["energy"]["joules"] > planned(*SEVEN, "--microbatch", "1", "--zero", "2")["energy"]["joules"]
    step = "5.93 s (4.98 s to 7.59 s)"
    for explain in ([], ["--explain"]):
        rate = 512 * 2048 / found["step_s"]
        assert f"step       {step}, {round(rate, -3):,.0f} tokens/s" in run(*arguments, *explain)[1]
    assert step in run("compare", *SEVEN, "--microbatch", "1", "--layout", "zero=3", "--layout", "zero=1")[1]
    (best,) = planned("search", *SEVEN, "--zero", "3", "--first", "1", "--no-simulate")["found"]
    least, most = best["step_range_s"]
    assert least <= best["step_s"] <= most
    assert planned(*SEVEN, "--zero", "1")["step_range_s"] is None
    assert planned(*SEVEN, "--zero", "3", "--data", "1", "--tensor", "8", "--pipeline", "8")["step_range_s"] is None
