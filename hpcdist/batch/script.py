"""The text of a job: rendering is pure, and every value is quoted for the language it lands in."""

import re
import shlex
from typing import Final

import jinja2

from hpcdist.batch import resources
from hpcdist.batch.job import BatchJob
from hpcdist.errors import REQUEUE, UsageError

TEMPLATE: Final = "train.sbatch.j2"

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.,:@%+=/-]+")


def render(job: BatchJob) -> str:
    """Return the sbatch script of ``job``. Raises UsageError for a value that no #SBATCH line can hold."""
    return environment().get_template(TEMPLATE).render(job=job, requeue_code=REQUEUE)


def environment() -> jinja2.Environment:
    """Return the templates of this installation, in which an unknown name is an error and not an empty text."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.folder(resources.TEMPLATES)),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # this is no HTML: the filters quote
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"directive": directive, "sh": lambda value: shlex.quote(str(value))}
    return found


def directive(value: object) -> str:
    r"""Return ``value`` quoted for sbatch's parser of #SBATCH lines, which takes \ as an escape in any quotes.

    Raises UsageError for control characters: a newline would end the line, and begin another option or a command.
    """
    text = str(value)
    if not text.isprintable():
        raise UsageError(f"{text!r} has a newline or another control character, which no #SBATCH line can hold")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
