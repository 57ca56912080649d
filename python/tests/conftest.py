"""Every folder here is a suite with requirements of its own, and the name of a marker.

`pytest python/tests -m vllm` collects the folder `vllm` alone, as `pytest python/tests/vllm` does:
modules of other suites import what may not be installed.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITES = {
    "base": "the package and the command, by official clients (scripts/pytest.sh)",
    "clients": "tool calls and structured output of client libraries (scripts/test-clients.sh)",
    "engines": "the router in front of real vLLM engines (scripts/test-engines.sh)",
    "nixl": "blocks that NIXL's own library moves (scripts/test-nixl.sh)",
    "ray": "questions on a Ray cluster (scripts/test-ray.sh)",
    "vllm": "the connector in vLLM's scheduler (scripts/test-vllm.sh)",
    "vllm_real": "the connector in vLLM with real models (scripts/test-vllm-real.sh)",
}


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    for suite, meaning in SUITES.items():
        config.addinivalue_line("markers", f"{suite}: {meaning}")


def _suite(path: Path) -> str:
    return path.relative_to(HERE).parts[0] if path != HERE else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out suites that neither a path nor `-m` names; `base` needs no name."""
    suite = _suite(collection_path)
    if suite not in SUITES:
        return None
    named = {
        _suite(path) for path in map(Path.resolve, map(Path, config.args)) if HERE in path.parents
    }
    wanted = (
        {suite for suite in SUITES if suite in config.option.markexpr.split()} or named or {"base"}
    )
    return None if suite in wanted else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its suite's marker."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(_suite(item.path))
