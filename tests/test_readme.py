"""Every Python block of the README runs, one after another in one namespace."""

import re
from pathlib import Path

import rla

README = Path(__file__).parent.parent / "README.md"


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)


def test_every_method_is_in_the_readme():
    text = README.read_text()
    assert [name for name in rla.METHODS if f"`{name}`" not in text] == []


def test_every_local_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert [link for link in links if not (README.parent / link).exists()] == []
