"""Rules between keys: they use existing keys and name the change; terms are evaluated correctly."""

import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import check, refusals, rule
from hpcdist.strategies import rules
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.reference import RULES

OPTIONS = {"data rank": 2, "feed-forward column": 512, "--survive": "shrink", "--spares": 0}
VALUES = rules.derived({**recipes.defaults(), **OPTIONS})


def test_every_rule_names_existing_keys():
    unknown = {key for each in RULES for key in (*each.conditions, *each.given) if key not in VALUES}
    assert unknown == set(), "such a rule would be passed over"


def test_default_values_violate_no_rule():
    assert list(refusals(RULES, VALUES)) == []


@pytest.mark.parametrize("each", RULES, ids=lambda each: " with ".join(each.conditions))
def test_every_rule_names_the_change(each):
    assert each.cure or any(condition.cure for key, condition in each.conditions.items() if "." in key)


@cases(
    "terms, values, message",
    ("a.x with a.y", {"a.x": 3, "a.y": True}, "a.x = 3 with a.y = true; set a.x = 0, or a.y = false"),
    ("a.x with a.y", {"a.x": 3, "a.y": False}, None),
    ("a.x with a.y", {"a.x": 3}, None),
    ("a.x=p|q->r", {"a.x": "q"}, "a.x = 'q'; set a.x = 'r'"),
    ("a.x=p|q->r", {"a.x": "r"}, None),
    ("a.x!=p|q", {"a.x": "r"}, "a.x = 'r'; set a.x to one of p, q"),
    ("a.x!=2", {"a.x": 2}, None),
    ("a.x>1 with a.y?", {"a.x": 2, "a.y": "s"}, "a.x = 2 with a.y = 's'; set a.x = 1"),
    ("a.x>1 with a.y<2", {"a.x": 1, "a.y": 1}, None),
    ("a.x where a.y=", {"a.x": "p", "a.y": ""}, "a.x = 'p'; set a.x = 'none'"),
    ("a.x where a.y=", {"a.x": "p", "a.y": "q"}, None),
    ("a.x where names~p|q", {"a.x": (1,), "names": ("q", "r")}, "a.x = [1]; set a.x = []"),
    ("a.x where names!~p|q", {"a.x": 1, "names": ("q", "r")}, None),
    ("a.x with --go=on with rank?", {"a.x": 1, "--go": "on", "rank": 2}, "a.x = 1 with --go on and 2 ranks; set"),
)
def test_terms_of_rules_are_evaluated(terms, values, message):
    if message is None:
        check([rule(terms)], values)
    else:
        with pytest.raises(ConfigurationError) as refused:
            check([rule(terms)], values)
        assert message in str(refused.value)
