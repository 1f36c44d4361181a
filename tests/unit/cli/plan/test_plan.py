"""`hpcdist plan` on a login node: no MPI or GPU, text, JSON and plots, and errors with exit codes."""

import json
import shlex
from dataclasses import replace

import click
import pytest

import hpcdist as toolkit
from harness import jobs
from harness.jobs import call_command
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


def invoke(capsys, *arguments):
    """Run the command in this process. Return its exit code, stdout and stderr."""
    return call_command(capsys, *arguments)


@pytest.fixture
def run(capsys):
    return lambda *arguments: invoke(capsys, "plan", *map(str, arguments))


@pytest.fixture
def plan_json(run):
    """A function that plans and returns the JSON output."""

    def run_plan(*arguments, expected=0):
        code, out, err = run(*arguments, "--json")
        assert expected is None or code == expected, err
        return json.loads(out)

    return run_plan


@pytest.fixture
def recipe(tmp_path):
    """A function that writes a recipe."""

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


def run_in_child(code):
    """Run ``code`` in a child after the definition of ``run(*words)``, which runs a plan that must succeed."""
    before = (
        "import sys\nfrom hpcdist.cli.main import main\ndef run(*words):\n    try:\n        main(['plan', *words])\n"
        "    except SystemExit as leaving:\n        assert not leaving.code, (words, leaving.code)\n"
    )
    done = jobs.python(before + code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_works_without_heavy_modules(recipe):
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
    shown = run_in_child(forbidden + "".join(f"run(*{words!r})\n" for words in commands))
    assert shown.count("closed forms: the simulator cannot be loaded") == 2


def test_help_imports_no_heavy_modules():
    names = ("search", "compare", "clusters", "models", "calibrate", "--calibrate")
    helps = "".join(f"run(*{words!r})\n" for words in [["--help"], *([name, "--help"] for name in names)])
    loaded = "[name for name in ('numpy', 'mpi4py', 'h5py', 'msgspec', 'numba') if name in sys.modules]"
    assert run_in_child(f"{helps}print('loaded:', *{loaded})").splitlines()[-1].strip() == "loaded:"


@pytest.mark.parametrize("name", [None, *group.COMMANDS])
def test_every_option_has_a_help_text(name):
    context = click.Context(group.command)
    command = group.command if name is None else group.command.get_command(context, name)
    assert command is not None and command.help
    assert not [one.name for one in command.params if isinstance(one, click.Option) and not one.help]


def test_help_shows_the_full_command(run):
    code, out, _ = run("search", "--help")
    assert code == 0 and out.startswith("Usage: hpcdist plan search [OPTIONS] [RECIPE]")
    code, out, _ = run("--help")
    assert code == 0 and out.startswith("Usage: hpcdist plan [OPTIONS] [RECIPE]") and "\n  compare " in out


def test_search_help_marks_varied_options():
    search, plain = (
        {one.name: one.help for one in command.params if isinstance(one, click.Option)}
        for command in (group.command.get_command(click.Context(group.command), "search"), group.command)
    )
    varied = {name for name, axis in SEARCH_AXES.items() if len(getattr(SearchSpec(), axis)) != 1}
    lines = {name for name, text in search.items() if text.endswith("  [default: varied]")}
    assert lines == varied | {"zero"} and "varied" not in " ".join(plain.values())
    assert search["devices"].endswith("[default: all of the cluster]")
    assert plain["devices"].endswith("[default: product of the degrees]")
    assert plain["pipeline"] == "Same as --set parallel.pipeline=VALUE."


@cases("written, tokens", ("32K", 32768), ("1m", 1 << 20), ("4096", 4096))
def test_context_may_have_a_unit(written, tokens, plan_json):
    plan = plan_json("--model", "gpt2", "--batch", 1, *ON, "--context", written, "--context-ranks", 8, expected=None)
    assert plan["tokens"] == tokens


def test_command_options_match_the_public_function():
    """The public function has every field of a layout and of a transformer."""
    apart = {"recipe", "overrides", "cluster", "explain", "plot", "as_json"}
    assert {one.name for one in group.command.params} - apart == set(use_case.OPTIONS)


def test_public_plan_function_returns_the_json_without_click(plan_json, recipe):
    words = (recipe(RECIPE), "--set", "model.layers=2", *ON, "--devices", 2, "--batch", 8, "--zero", 1)
    keys = {"model.layers": 2}
    assert toolkit.plan(words[0], keys=keys, cluster=ON[1], devices=2, batch=8, zero=1) == plan_json(*words)
    with pytest.raises(UsageError, match="plan has no option 'tensr'; did you mean 'tensor'"):
        toolkit.plan(cluster=ON[1], tensr=2)
    code = "import sys, hpcdist; hpcdist.plan; print({'click', 'mpi4py'} & set(sys.modules))"
    assert jobs.python(code).stdout == "set()\n"


def test_options_select_the_planned_layout(plan_json):
    plan = plan_json(
        *(*GPT, *ON, "--pipeline", "2", "--tensor", "2", "--devices", "16", "--zero", "1", "--microbatch", "2"),
        *("--schedule", "gpipe", "--sequence-parallel", "--recompute", "full", "--compression", "int8"),
        *(
            "--main-gradients",
            "working",
            "--implementation",
            "megatron-2022",
            "--overlap",
            "0.5",
            "--algorithm",
            "ring",
        ),
        *("--activations", "float32", "--optimizer-slots", "1", "--steps", "7", "--library", "mpi"),
        *("--no-gradient-fusion", "--tensor-overlap", "0.25"),
    )
    layout = plan["layout"]
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
        "implementation": "megatron-2022",
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
    assert plan["run"]["steps"] == 7 and plan["global_batch"] == 32
    assert plan["memory"]["bytes"] == pytest.approx(sum(plan["memory"]["terms"].values()))
    assert plan["step_s"] == pytest.approx(sum(plan["timing"]["terms"].values()))
    assert plan["hfu"] > plan["mfu"] > 0


def test_every_model_option_changes_the_parameter_count(plan_json):
    base = plan_json(*GPT, *ON)["parameters"]
    hidden, layers, words = 256, 4, 1000
    assert plan_json(*GPT, *ON, "--untied")["parameters"] == base + hidden * words
    assert plan_json(*GPT, *ON, "--feed-forward", 512)["parameters"] < base
    assert (
        plan_json(*GPT, *ON, "--mlp-ratio", 2)["parameters"]
        == plan_json(*GPT, *ON, "--feed-forward", 512)["parameters"]
    )
    assert plan_json(*GPT, *ON, "--mlp-ratio", 4)["parameters"] == base
    assert plan_json(*GPT, *ON, "--kv-heads", 1)["parameters"] < base
    assert plan_json(*GPT, *ON, "--gated", "--feed-forward", 1024)["parameters"] > base
    assert plan_json(*GPT, *ON, "--no-bias")["parameters"] < base
    assert plan_json(*GPT, *ON, "--positions", "rotary")["parameters"] == base - 128 * hidden
    assert plan_json(*GPT, *ON, "--norm", "rms")["parameters"] == base - (2 * layers + 1) * hidden
    assert plan_json(*GPT, *ON, "--experts", 4, "--experts-per-token", 2)["parameters"] > 2.5 * (base - words * hidden)
    assert plan_json(*(word if word != "128" else "256" for word in GPT), *ON)["tokens"] == 2 * 32 * 128
    assert plan_json(*GPT, *ON, "--no-causal")["parameters"] == base


def test_named_model_is_planned(plan_json):
    plan = plan_json(*NAMED, *ON, "--tokens", 64 * 1024 * 10 + 1)
    assert plan["model"] == "gpt2" and plan["parameters"] == 124_439_808
    assert plan["run"]["steps"] == 11 and "bfloat16 is assumed" in " ".join(plan["flags"])
    keys = [f"--set={key}" for key in ("parallel.tensor=2", "parallel.strategy=zero1", "precision.mode=float32")]
    assert plan_json(*NAMED, *ON, *keys) == plan_json(*NAMED, *ON, "--tensor", 2, "--zero", 1, "--precision=float32")
    assert plan_json(*NAMED, *ON, "--context", 512)["tokens"] == 64 * 512


def test_recipe_is_planned_as_it_would_run(plan_json, recipe):
    path = recipe(RECIPE)
    plan = plan_json(path, "--cluster", "workstation", "--devices", 2)
    assert plan["model"] == "mine" and plan["run"]["steps"] == 50 and plan["global_batch"] == 16
    layout = plan["layout"]
    assert (layout["data"], layout["precision"], layout["overlap"], layout["optimizer_slots"]) == (2, "float32", 0.0, 2)
    assert (layout["microbatch"], layout["microbatches"]) == (8, 1)
    cut = plan_json(
        *(path, "--cluster", "workstation", "--set", "parallel.pipeline=2", "--set", "parallel.microbatches=4"),
        *("--set", "parallel.recompute=true", "--set", "optimizer.name=sgd", "--set", "optimizer.momentum=0.0"),
    )["layout"]
    assert (cut["pipeline"], cut["microbatch"], cut["schedule"], cut["recompute"]) == (2, 4, "1f1b", "full")
    assert cut["optimizer_slots"] == 0
    half = plan_json(path, *ON, "--set", "precision.mode=bfloat16", "--set", "communication.overlap=thread")["layout"]
    assert plan_json(path, *ON, "--pipeline", 2, "--schedule", "zb-v")["layout"]["chunks"] == 2
    assert (half["precision"], half["activations"], half["overlap"]) == ("bfloat16", "float32", 1.0)


def test_default_recipe_is_planned_without_arguments(plan_json, recipe):
    plan = plan_json("--cluster", "workstation", "--devices", 2)
    written = plan_json(recipe("", "empty.toml"), "--cluster", "workstation", "--devices", 2)
    assert plan["model"] == "the default recipe" and written["model"] == "empty"
    assert plan | {"model": ""} == written | {"model": ""}
    assert plan_json("compare", "--cluster", "workstation", "--layout", "data=1", "--layout", "data=2")[1]["step_s"] > 0


def test_options_override_the_recipe(plan_json, recipe):
    plan = plan_json(recipe(RECIPE), *ON, "--tensor", 2, "--batch", 8, "--zero", 3, "--data", 2, "--steps", 5)
    layout = plan["layout"]
    assert (layout["tensor"], layout["data"], layout["strategy"], layout["microbatch"]) == (2, 2, "zero3", 4)
    assert plan["global_batch"] == 8 and plan["run"]["steps"] == 5


def test_parameter_servers_of_a_recipe_are_planned(plan_json, recipe):
    path = recipe(RECIPE + "[parallel]\nstrategy = 'parameter_server'\n[parameter_server]\nservers = 2\n")
    layout = plan_json(path, *ON, "--devices", 6)["layout"]
    assert (layout["servers"], layout["data"], layout["devices"]) == (2, 4, 6)
    colocated = plan_json(path, *ON, "--devices", 6, "--set", "parameter_server.placement=colocated")
    assert (colocated["layout"]["servers"], colocated["layout"]["data"]) == (0, 6)
    assert any("every rank served" in flag for flag in colocated["flags"])


@cases(
    "key, output",
    ("communication.compression=qsgd", "planned as int8"),
    ("communication.algorithm=circulant", "planned as the fastest"),
    ("run.logical_shards=4", "fixed summation"),
    ("parallel.strategy=zero1", "one replica is planned"),
    ("run.batch_warmup=[96, 8]", "run.batch_warmup"),
)
def test_unplanned_recipe_keys_are_reported(key, output, plan_json, recipe):
    assert output in " ".join(plan_json(recipe(RECIPE), *ON, "--set", key)["flags"])


def test_attention_of_packed_documents_is_planned_per_document(plan_json, recipe, tmp_path):
    """Without data to measure documents, attention over whole contexts is planned, with a note."""
    keys = [f"--set={key}" for key in ("data.context=512", "data.packed=true", "data.document_end=10")]
    keys.append("--set=data.validation_fraction=0")
    path = recipe(RECIPE)
    (tmp_path / "lines.txt").write_text("a line of 32 bytes, with its end\n" * 800)  # 32 tokens each, 16 per sample
    within = plan_json(path, *ON, *keys, f"--set=data.path={tmp_path / 'lines.txt'}")
    whole = plan_json(path, *ON, *keys, f"--set=data.path={tmp_path / 'none'}")
    assert whole["step_s"] == plan_json(path, *ON, keys[0])["step_s"] > within["step_s"]
    assert within["memory"] == whole["memory"]
    assert f"have {33 / 513:.1%} of the pairs of tokens of whole contexts" in " ".join(within["flags"])
    assert "its maximum" in " ".join(whole["flags"])


@cases(
    "more, output",
    ([], True),
    (["--devices", 2], False),
    (["--set", "parallel.data=2"], False),
)
def test_text_notes_if_only_one_replica_is_planned(more, output, run, recipe):
    code, out, _ = run(recipe(RECIPE), *ON, *more, "--explain")
    layout = " ".join(out[out.index("\nlayout ") : out.index("\nmemory ")].split())
    assert code == 0 and ("--devices N plans for N devices" in layout) == output
    assert out.count("one replica is planned") == output


def test_model_from_options_is_planned_on_one_replica(plan_json):
    assert any("one replica is planned" in flag for flag in plan_json(*GPT, *ON)["flags"])
    assert not any("one replica is planned" in flag for flag in plan_json(*GPT, *ON, "--data", 2)["flags"])


@cases(
    "more, gains",
    (["--precision", "bfloat16", "--activations", "float32"], False),
    (["--precision", "bfloat16", "--activations", "working"], True),
    (["--precision", "float32"], True),
)
def test_16_bit_plan_with_float32_activations_is_flagged(more, gains, plan_json):
    flags = plan_json(*GPT, *ON, *more)["flags"]
    assert any("with float32 activations" in flag for flag in flags) != gains


def test_explain_lists_assumptions(run, recipe):
    code, out, _ = run(recipe(RECIPE), *ON, "--explain")
    assert code == 0
    assert "rule: 16 bytes per parameter" in out and "MFU" in out and "HFU" in out and "GiB" in out
    assert "assumption" in out
    lines = [line for line in out.splitlines() if "the time of a restart is an assumption" in line]
    assert len(lines) <= 1


def test_flags_are_listed_once_with_the_decisive_first(run, plan_json):
    arguments = ["--model", "gpt3-175b", "--batch", "65", "--data", "64", "--tensor-overlap", "0.5", *ON]
    flags = plan_json(*arguments, expected=1)["flags"]
    assert flags[0].startswith("the plan does not fit") and flags[-1].startswith(
        "assumed in the cluster file of a100-selene"
    )
    assert "65 samples on 64 replicas: 1 replica computes 2 micro-batches, while the others compute 1 and wait" in flags
    assert "tensor_overlap = 0.5 has no effect with one tensor device" in flags
    assert any("attention_share" in one for one in plan_json(*arguments, expected=1)["assumptions"])
    _, out, _ = run("search", *GPT, *ON, "--devices", "16", "--first", "3")
    lines = [line for line in out.splitlines() if line.startswith("note: ")]
    assert len(lines) == len(set(lines)) and lines[-1].startswith("note: assumed in the cluster file")
    assert sum("messages that hide" in line for line in lines) <= 1


def test_plan_that_does_not_fit_exits_with_1(run, plan_json):
    arguments = ["--model", "gpt3-175b", "--batch", "8", *ON]
    code, out, _ = run(*arguments)
    assert code == 1 and "DOES NOT FIT" in out
    assert plan_json(*arguments, expected=1)["memory"]["fits"] is False
    each = ["compare", *arguments, "--layout", "zero=1"]
    assert run(*each, "--layout", "zero=2")[0] == 1
    assert run(*each, "--layout", "tensor=8,pipeline=8,recompute=full")[0] == 0


@cases(
    "arguments, code, output",
    ([*GPT], 2, "give --cluster NAME (one of a100-selene"),
    ([*GPT, "--cluster", "a100-selen"], 78, "the nearest is 'a100-selene'"),
    (["--model", "gpt2-xll", "--batch", "8", *ON], 78, "gpt2-xl"),
    (["--model", "gpt2", *ON], 2, "give --batch"),
    (["--layers", "4", *ON, "--batch", "4"], 2, "--hidden, --heads, --vocabulary, --context"),
    ([*NAMED, *ON, "--layers", "3"], 2, "--model gpt2 and --layers"),
    ([*NAMED, *ON, "--set", "model.layers=3"], 2, "--set model.layers and --model both describe"),
    ([*GPT, *ON, "--feed-forward", "512", "--mlp-ratio", "2"], 2, "--feed-forward and --mlp-ratio"),
    ([*GPT, *ON, "--mlp-ratio", "1.001"], 2, "not an integer"),
    ([*GPT, *ON, "--mlp-ratio", "inf"], 2, "inf is not a finite number"),
    ([*GPT, *ON, "--mlp-ratio", "nan"], 2, "nan is not a finite number"),
    ([*GPT, *ON, "--tokens", "nan"], 2, "nan is not a finite number"),
    ([*GPT, *ON, "--tokens", "inf"], 2, "inf is not a finite number"),
    ([*GPT, *ON, "--tokens", "1e300"], 2, "at most 1,000,000,000,000 steps"),
    ([*GPT, *ON, "--steps", "9" * 30], 2, "at most 1,000,000,000,000 steps"),
    ([*GPT, *ON, "--overlap", "nan"], 2, "nan is not a finite number"),
    ([*GPT, *ON, "--tensor-overlap", "nan"], 2, "nan is not a finite number"),
    ([*GPT, *ON, "--experts-per-token", "2"], 2, "needs --experts"),
    ([*GPT, *ON, "--steps", "3", "--tokens", "1e6"], 2, "--steps 3 and --tokens 1e+06"),
    ([*GPT, *ON, "--zero", "2", "--strategy", "allreduce"], 2, "--zero 2 means --strategy zero2"),
    ([*GPT, *ON, "--servers", "2", "--zero", "1"], 2, "--servers 2 needs --strategy parameter_server"),
    ([*GPT, *ON, "--schedule", "zb-h1"], 2, "--schedule zb-h1 with one pipeline device"),
    ([*GPT, *ON, "--chunks", "2"], 2, "--chunks 2 with one pipeline device"),
    ([*GPT, *ON, "--pipeline", "2", "--schedule", "interleaved"], 78, "at least 2 chunks"),
    ([*GPT, *ON, "--pipeline", "2", "--schedule", "zb-v", "--chunks", "3"], 78, "this schedule has 2 per rank"),
    ([*GPT, *ON, "--sequence-parallel"], 78, "has no effect"),
    ([*GPT, *ON, "--main-gradients", "working"], 2, "needs --implementation megatron"),
    (
        [*GPT, *ON, "--main-gradients", "working", "--implementation", "megatron-2022", "--precision", "float32"],
        2,
        "--main-gradients working has no effect with the precision float32",
    ),
    ([*GPT, *ON, "--no-gradient-fusion"], 2, "needs --implementation megatron"),
    ([*GPT, *ON, "--activations", "float32", "--precision", "float32"], 2, "no effect with the precision float32"),
    ([*GPT, *ON, "--devices", "7", "--tensor", "2"], 2, "data ? x pipeline 1 x tensor 2 x context 1"),
    ([*GPT, *ON, "--devices", "8", "--tensor", "2", "--data", "2"], 2, "the nearest possible number of devices is 4"),
    ([*GPT, *ON, "--tensor", "3"], 78, "tensor = 3"),
    ([*GPT, *ON, "--data", "64"], 78, "a global batch of 32"),
    ([*GPT, *ON, "--pipeline", "2", "--schedule", "zb-h1", "--recompute", "full"], 78, "recompute"),
    ([*GPT, "--cluster", "workstation", "--data", "4"], 78, "2 more than the 2 of workstation"),
    ([*GPT, *ON, "--precision", "int8"], 2, "int8"),
    ([*GPT, *ON, "--context", "32KB"], 2, "'32KB' is not a number of tokens; expected a number such as 4096, 16K"),
    ([*GPT, *ON, "--context", "0"], 2, "'0' is not a number of tokens"),
    ([*GPT, *ON, "--plot", "plan.xls"], 2, "choose a file name extension from"),
    ([*GPT, *ON, "--plot", "/nowhere/plan.png"], 74, "/nowhere is not a directory"),
    (["no-such-recipe.toml", *ON], 74, "recipe no-such-recipe.toml: there is no such file"),
    ([*GPT, "--cluster", "no-such-cluster.toml"], 74, "the cluster no-such-cluster.toml: there is no such file"),
    (["serch", *ON], 2, "did you mean `hpcdist plan search`?"),
    (["comapre", *ON], 2, "did you mean `hpcdist plan compare`?"),
    (["--no-such-option"], 2, "--no-such-option"),
)
def test_invalid_plans_are_rejected(arguments, code, output, run):
    result, out, err = run(*arguments)
    assert (result, out) == (code, ""), err
    assert output in err and "Traceback" not in err


def test_recipe_with_a_model_name_is_rejected(run, recipe):
    code, _, err = run(recipe(RECIPE), *NAMED, *ON)
    assert code == 2 and "both describe a model" in err


@cases(
    "text, output",
    ("[model]\nkind = 'import'\nfactory = 'a:b'\n", "the planner does not know the layers of this model"),
    ("[parallel]\nstrategy = 'gossip'\n", "'gossip' cannot be planned"),
    ("[model]\nkind = 'convnet'\n[data]\npath = 'none.h5'\n", "there is no such file"),
)
def test_unsupported_recipes_are_rejected(text, output, run, recipe):
    code, _, err = run(recipe(text), *ON)
    assert code == 78 and output in err


def test_plot_is_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    code, _, err = run(*GPT, *ON, "--pipeline", "2", "--microbatch", "4", "--plot", file)
    assert code == 0, err
    assert file.read_bytes().startswith(b"\x89PNG")


def test_cluster_file_is_planned(run, plan_json, tmp_path):
    local_data = replace(toml_file.read("a100-selene"), name="mine", devices=16)
    path = tmp_path / "mine.toml"
    path.write_text(toml_file.dump(local_data))
    assert plan_json(*GPT, "--cluster", path)["cluster"] == "mine"
    code, _, err = run(*GPT, "--cluster", path, "--data", "32")
    assert code == 78 and "16 more than the 16 of mine" in err
    code, out, _ = run("clusters", path)
    assert code == 0 and out == path.read_text()
    path.write_text(path.read_text().replace("devices = 16", "devises = 16"))
    code, _, err = run("clusters", path)
    assert code == 78 and "devises" in err and str(path) in err


def test_clusters_and_models_are_listed(run):
    code, out, _ = run("clusters")
    assert code == 0 and all(f"{name} " in out for name in toml_file.names())
    code, out, _ = run("models", "--json")
    assert code == 0 and json.loads(out)["gpt2"]["parameters"] == 124_439_808
    code, out, _ = run("models", "gpt2")
    assert code == 0 and "layers = 12\n" in out
    code, out, _ = run("models", "gtp2")
    assert code == 78


def test_search_lists_and_explains_layouts(run, plan_json, tmp_path):
    arguments = ["search", *GPT, *ON, "--devices", "16", "--first", "3"]
    plan = plan_json(*arguments)
    assert len(plan["found"]) == 3
    steps = [one["step_s"] for one in plan["found"]]
    assert steps == sorted(steps)
    assert all(one["layout"]["devices"] == 16 for one in plan["found"])
    code, out, err = run(*arguments)
    assert code == 0, err
    assert "least time among" in out and "\n 1  " in out and "\n 3  " in out and "refused" in out
    assert f"command to plan row 1: {plan['again']}\n" in out


PIPELINES = "[parallel]\npipeline = 2\nmicrobatches = 4\nrecompute = true\n"
SERVED = "[parallel]\nstrategy = 'parameter_server'\n[parameter_server]\nservers = 2\n"


@cases(
    "arguments, text",
    ([*GPT, *ON, "--devices", "16"], None),
    ([*GPT, *ON, "--devices", "16", "--pipeline", "2", "--schedule", "zb-v"], None),
    ([*GPT, *ON, "--devices", "16", "--pipeline", "2", "--no-simulate", "--untied", "--kv-heads", "2"], None),
    ([*GPT, *ON, "--devices", "16", "--pipeline", "2", "--schedule", "interleaved", "--chunks", "2"], None),
    (
        [*NAMED, *ON, "--devices", "12", "--zero", "3", "--objective", "energy", "--implementation", "megatron-2022"],
        None,
    ),
    ([*NAMED, *ON, "--devices", "8", "--tensor", "4", "--sequence-parallel", "--overlap", "0.5"], None),
    ([*NAMED, *ON, "--devices", "8", "--context-ranks", "2", "--tokens", "1e9", "--memory", "60 GB"], None),
    ([*NAMED, *ON, "--devices", "8", "--compression", "int8", "--precision", "float32"], None),
    ([*ON, "--devices", "4"], RECIPE),
    ([*ON, "--devices", "4", "--set", "model.layers=6", "--set", "parallel.sequence_parallel=false"], RECIPE),
    ([*ON, "--devices", "4", "--pipeline", "1"], RECIPE + PIPELINES),
    ([*ON, "--devices", "8", "--pipeline", "2", "--recompute", "none"], RECIPE + PIPELINES),
    ([*ON, "--devices", "8", "--strategy", "parameter_server"], RECIPE + SERVED),
)
def test_printed_command_plans_the_best_layout_again(arguments, text, plan_json, recipe):
    path = [] if text is None else [recipe(text, "with a space.toml")]
    plan = plan_json("search", *path, *arguments, "--first", "2")
    best, words = plan["found"][0], shlex.split(plan["again"])
    assert words[:2] == ["hpcdist", "plan"]
    again = plan_json(*words[2:])
    idle = {"schedule": "", "chunks": 1} if best["layout"]["pipeline"] == 1 else {}
    assert again["layout"] | idle == best["layout"] | idle
    for name in ("step_s", "memory", "timing", "run", "energy", "parameters", "global_batch", "cluster"):
        assert again[name] == best[name]


def test_search_reports_unused_devices(plan_json):
    arguments = ["search", *GPT, *ON, "--first", "2", "--objective", "cost"]
    output = "energy and price count 2 whole nodes: 4 of 16 devices are not used"
    assert output in plan_json(*arguments, "--devices", "12", "--implementation", "hpcdist")["flags"]
    assert not any("not used" in flag for flag in plan_json(*arguments, "--devices", "16")["flags"])


def test_search_keeps_given_options_fixed(plan_json):
    plan = plan_json(
        *("search", *GPT, *ON, "--devices", "16", "--tensor", "2", "--zero", "3", "--recompute", "full"),
        *("--precision", "float32", "--memory", "40 GB", "--objective", "energy", "--no-simulate", "--distinct"),
    )
    assert plan["objective"] == "energy" and plan["found"]
    for one in plan["found"]:
        layout = one["layout"]
        assert (layout["tensor"], layout["recompute"], layout["precision"]) == (2, "full", "float32")
        assert layout["strategy"] == "zero3"
        assert one["memory"]["bytes"] <= 40e9
    values = [one["value"] for one in plan["found"]]
    assert values == sorted(values)


def test_search_uses_all_devices_of_the_cluster(plan_json, recipe):
    small = ["search", "--cluster", "workstation", "--first", "1"]
    for subject in ([*GPT, "--precision", "float32"], [recipe(RECIPE)]):
        assert plan_json(*small, *subject)["devices"] == 2
        for devices in ([], ["--devices", "2"]):
            assert not any("one replica is planned" in flag for flag in plan_json(*small, *subject, *devices)["flags"])


def test_search_keeps_other_recipe_keys(plan_json, recipe):
    plan = plan_json("search", recipe(RECIPE), *ON, "--devices", "4", "--first", "2")
    layouts = [one["layout"] for one in plan["found"]]
    assert {layout["precision"] for layout in layouts} == {"float32"}
    assert {layout["overlap"] for layout in layouts} == {0.0}
    assert {one["run"]["steps"] for one in plan["found"]} == {50}


@cases(
    "arguments, code, output",
    (["--data", "2", "--devices", "4"], 2, "the search computes --data from --devices"),
    (["--devices", "4", "--memory", "80"], 2, "has no unit"),
    (["--devices", "4", "--memory", "80 Gb"], 2, "bits or bytes"),
    (["--devices", "4", "--memory", "inf GB"], 2, "has no readable number"),
    (["--devices", "4", "--memory", "1e400 GB"], 2, "not a finite number"),
    (["--devices", "4", "--memory", "0 GB"], 2, "must be above 0"),
    (["--devices", "4", "--memory", "900 GB"], 2, "and at most 85,899,345,920 bytes"),
    (["--devices", "100000"], 2, "has only 4480"),
)
def test_invalid_searches_are_rejected(arguments, code, output, run):
    result, out, err = run("search", *GPT, *ON, *arguments)
    assert (result, out) == (code, ""), err
    assert output in err


def test_search_without_a_fitting_layout_exits_with_1(run):
    code, out, _ = run("search", "--model", "megatron-1t", "--batch", "8", *ON, "--devices", "8", "--first", "2")
    assert code == 1 and "no layout fits" in out


def test_comparison_prints_one_line_per_plan(run, plan_json):
    arguments = ["compare", *GPT, *ON, "--cluster", "h100-hgx", "--layout", "tensor=2", "--layout", "data=4 zero=1"]
    plan = plan_json(*arguments)
    assert [(one["cluster"], one["layout"]["tensor"], one["layout"]["data"]) for one in plan] == [
        ("a100-selene", 2, 1),
        ("a100-selene", 1, 4),
        ("h100-hgx", 2, 1),
        ("h100-hgx", 1, 4),
    ]
    code, out, _ = run(*arguments)
    assert code == 0
    lines = [line for line in out.splitlines() if line[:7] in ("1  a100", "2  a100", "3  h100", "4  h100")]
    assert len(lines) == 4 and "zero1" in lines[1] and "row 4 compared with row 1: " in out


def test_impossible_layouts_are_left_out_of_a_comparison(run, plan_json):
    arguments = ["compare", *GPT, *ON, "--layout", "tensor=3", "--layout", "tensor=2"]
    impossible, possible = plan_json(*arguments)
    assert "tensor = 3" in impossible["impossible"] and possible["impossible"] is None and possible["step_s"] > 0
    code, out, _ = run(*arguments)
    assert code == 0 and "left out: tensor=3 on a100-selene: this layout is not possible: tensor = 3" in out
    code, out, err = run("compare", *GPT, *ON, "--layout", "tensor=3", "--layout", "tensor=5")
    assert (code, out) == (78, "") and "tensor = 3" in err and "tensor = 5" in err


def test_notes_common_to_all_plans_are_printed_once(run):
    code, out, _ = run("compare", *GPT, *ON, "--cluster", "h100-hgx")
    assert code == 0 and out.count("neither --steps nor --tokens is given") == 1
    assert all(
        f"note: row {row}: assumed in the cluster file of {name}" in out for row, name in ((1, "a100"), (2, "h100"))
    )


def test_compared_layout_may_set_devices_and_batch(plan_json):
    plan = plan_json("compare", *GPT, *ON, "--layout", "devices=4", "--layout", "devices=8,batch=64")
    assert [(one["layout"]["data"], one["global_batch"]) for one in plan] == [(4, 32), (8, 64)]


@cases(
    "arguments, output",
    ([*ON, "--layout", "tensor=2"], "nothing to compare"),
    ([*ON, "--layout", "tensr=2", "--layout", "tensor=2"], "'--tensor'"),
    ([*ON, "--layout", "tensor=two", "--layout", "tensor=2"], "expected a whole number"),
    ([*ON, "--layout", "zero=1,strategy=zero2", "--layout", "tensor=2"], "--zero 1 means --strategy zero1"),
)
def test_invalid_comparisons_are_rejected(arguments, output, run):
    code, out, err = run("compare", *GPT, *arguments)
    assert (code, out) == (2, "") and output in err


def test_shell_completion_of_names():
    parameters = {one.name: one for one in group.command.params}
    context = click.Context(group.command)
    results = [item.value for item in parameters["cluster"].shell_complete(context, "a100")]
    assert results == ["a100-selene"]
    assert [item.value for item in parameters["recipe"].shell_complete(context, "cl")] == ["clusters", "cl"]
    assert "gpt2-xl" in [item.value for item in parameters["model"].shell_complete(context, "gpt2")]


SEVEN = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--vocabulary", "32000", "--context", "2048"]
SEVEN += ["--batch", "512", "--devices", "64", "--cluster", "h100-hgx"]
OURS = ["--implementation", "hpcdist"]


def test_unmeasured_mfu_is_limited_with_a_leading_note(run, plan_json):
    arguments = [*SEVEN, *OURS, "--zero", "1", "--microbatch", "4"]
    plan = plan_json(*arguments)
    assert plan["is_capped"] and plan["mfu"] == pytest.approx(0.542) and plan["modelled_mfu"] > 0.6
    assert sum(plan["timing"]["terms"].values()) == pytest.approx(plan["step_s"])
    limited = "LIMITED: MFU is limited to 54.2%, the best published training on such"
    assert run(*arguments, "--explain")[1].startswith(limited)
    assert "MFU 54.2 %, limited to the best published" in run(*arguments)[1]
    table = ["--layout", "zero=1", "--layout", "tensor=8,microbatch=1"]
    assert run("compare", *SEVEN, *OURS, "--microbatch", "4", *table)[1].startswith("* MFU of row 1 limited to 54.2 %")
    _, out, _ = run("search", *SEVEN, *OURS, "--first", "2", "--no-simulate")
    assert out.startswith("* MFU of rows 1, 2 limited to 54.2 %") and "zero3" not in out.split("row 1 in full")[0]


def test_uncalibrated_gpu_is_planned_with_published_kernels(plan_json, recipe, tmp_path):
    arguments = [*SEVEN, "--zero", "1", "--recompute", "full"]
    plan = plan_json(*arguments)
    assert plan["layout"]["implementation"] == "fsdp2"
    split = plan_json(*arguments, "--tensor", "2")
    assert split["layout"]["implementation"] == "megatron-core" and not split["is_capped"] and split["step_range_s"]
    assert plan_json(*arguments, *OURS)["layout"]["implementation"] == "hpcdist"
    text = toml_file.dump(replace(toml_file.read("h100-hgx"), calibrated="here, today"))
    (tmp_path / "own.toml").write_text(text)
    local_values = [
        *arguments[: arguments.index("h100-hgx")],
        tmp_path / "own.toml",
        *arguments[arguments.index("--zero") :],
    ]
    assert plan_json(*local_values)["layout"]["implementation"] == "hpcdist"
    output = plan_json(recipe(RECIPE), "--cluster", "h100-hgx", "--devices", "4", "--precision", "bfloat16")
    assert (output["layout"]["implementation"], output["layout"]["library"]) == ("fsdp2", "mpi")
    assert any("hpcdist is not measured" in flag for flag in output["flags"])
    assert plan_json(recipe(RECIPE), "--cluster", "workstation")["layout"]["implementation"] == "hpcdist"


def test_runnable_search_finds_no_faster_layout(run, plan_json):
    arguments = ["search", *SEVEN, "--first", "1", "--no-simulate"]
    (best,), (runnable,) = (plan_json(*arguments, *more)["found"] for more in ([], ["--runnable"]))
    assert best["layout"]["implementation"] == runnable["layout"]["implementation"] == "megatron-core"
    assert runnable["step_s"] >= best["step_s"]
    assert "kernels and memory of megatron" in run(*arguments)[1].splitlines()[0]
    assert "kernels and memory of hpcdist" in run(*arguments, *OURS)[1].splitlines()[1]
    recomputed = [*arguments, "--recompute", "selective", "--runnable"]
    assert not plan_json(*recomputed, expected=1)["found"], "this version has no selective recomputation"


@pytest.mark.parametrize("runnable", [False, True])
def test_search_notes_if_only_runnable_layouts_are_listed(run, runnable):
    arguments = ["search", *GPT, *ON, "--devices", "2", "--first", "1", "--no-simulate"]
    _, out, _ = run(*arguments, *(["--runnable"] if runnable else []))
    (note,) = [line for line in out.splitlines() if "--runnable" in line]
    assert note == f"note: {RUNNABLE_ALONE if runnable else WITH_OTHERS}"


def test_zero3_time_is_corrected_by_its_median_error(run, plan_json):
    old = [*SEVEN, "--implementation", "megatron-2022"]
    arguments = [*old, "--microbatch", "1", "--zero", "3"]
    plan = plan_json(*arguments)
    modelled_s = plan["step_s"] - plan["timing"]["terms"]["correction"]
    assert plan["step_s"] == pytest.approx(1.5 * modelled_s) == sum(plan["timing"]["terms"].values())
    assert plan["step_range_s"] == pytest.approx([1.26 * modelled_s, 1.92 * modelled_s])
    assert plan["run"]["work_s"] == pytest.approx(plan["run"]["steps"] * plan["step_s"])
    assert plan["energy"]["joules"] > plan_json(*old, "--microbatch", "1", "--zero", "2")["energy"]["joules"]
    step = "5.93 s (4.98 s to 7.59 s)"
    for explain in ([], ["--explain"]):
        rate = 512 * 2048 / plan["step_s"]
        assert f"step       {step}, {round(rate, -3):,.0f} tokens/s" in run(*arguments, *explain)[1]
    assert step in run("compare", *old, "--microbatch", "1", "--layout", "zero=3", "--layout", "zero=1")[1]
    (best,) = plan_json("search", *old, "--zero", "3", "--first", "1", "--no-simulate")["found"]
    least, most = best["step_range_s"]
    assert least <= best["step_s"] <= most
    assert plan_json(*old, "--zero", "1")["step_range_s"] is None
    assert plan_json(*old, "--zero", "3", "--data", "1", "--tensor", "8", "--pipeline", "8")["step_range_s"] is None


def test_earlier_name_of_a_program_works_and_names_the_new_one(plan_json):
    plan = plan_json(*SEVEN, "--zero", "1", "--recompute", "full", "--implementation", "megatron")
    assert plan["layout"]["implementation"] == "megatron-2022"
    assert any("earlier name of megatron-2022" in flag for flag in plan["flags"])


@cases(
    "words, change",
    (("--zero", "1"), "--context-ranks 2"),
    (("--zero", "3", "--microbatch", "4"), "--microbatch 1"),
    (("--zero", "0", "--microbatch", "2"), "--strategy zero2"),
)
def test_plan_that_does_not_fit_ends_with_a_command_that_fits(run, plan_json, words, change):
    model = ("--model", "llama-3-8b", "--context", "8192", "--cluster", "h100-hgx", "--devices", "8", "--batch", "64")
    code, out, _ = run(*model, *words)
    last = out.splitlines()[-1]
    assert code == 1 and "DOES NOT FIT" in out and last.startswith("this fits: hpcdist plan ") and change in last
    again = plan_json(*shlex.split(last)[4:])
    assert again["memory"]["fits"]


def test_hugging_face_directory_is_planned_as_its_model(plan_json, tmp_path):
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config |= {"num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu"}
    config |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--cluster", "h100-hgx", "--devices", "8", "--batch", "64", "--zero", "3")
    published = plan_json("--model", "llama-3-8b", "--context", "8192", *words)
    for path in (tmp_path, tmp_path / "config.json"):
        assert plan_json("--model", path, *words)["step_s"] == published["step_s"]


def test_search_names_the_rows_that_cannot_be_told_apart(run):
    _, out, _ = run("search", *SEVEN, "--first", "3", "--no-simulate", "--tensor", "4")
    assert "rows 1, 2, 3 cannot be told apart: the step of row 1 is within their ranges" in out
    assert "cannot be told apart" not in run("search", *SEVEN, *OURS, "--first", "3", "--no-simulate")[1]
