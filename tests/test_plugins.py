"""What a name in a config stands for, and what is said of one that stands for nothing."""

import sys
from pathlib import Path

import pytest
from torch import nn

from gmeta_keys.plugins import Registry
from gmeta_models import InputSizes, ModelConfig, build_model
from gmeta_models.registry import MODELS, NAMED_MODELS, check_outputs
from tests.support.refusals import catch_message

SIZES = InputSizes(2, 0, 0)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a package `mine_1`."""
    (tmp_path / "mine_1").mkdir()
    (tmp_path / "mine_1" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "mine_1"  # type: ignore[misc]
    for name in [name for name in sys.modules if name.startswith("mine_1")]:
        del sys.modules[name]


def refusal(name: str, **options: object) -> str:
    return catch_message(ValueError, build_model, ModelConfig(name=name, options=options), SIZES)


def test_each_mistake_gets_a_line_of_its_own(package: Path) -> None:
    (package / "broken.py").write_text("1 / 0\n")
    (package / "models.py").write_text(
        "from torch import nn\n"
        "class Deep(nn.Module):\n"
        "    def __init__(self, config, sizes):\n        super().__init__()\n"
        "deep = Deep(None, None)\n"
    )
    known = ", ".join(sorted([*MODELS, "dot"]))
    ends = {
        "dlmr": f"is unknown: known are {known}. Did you mean 'dlrm'? Choose one of them, or name "
        "yours as package.module:Name (docs/extending.md)",
        "no_such_package.a:B": f"cannot be imported by {sys.executable}: No module named "
        "'no_such_package'. Install its package where every rank runs, or set PYTHONPATH",
        "mine_1.broken:B": "cannot be imported: ZeroDivisionError: division by zero. Mend the "
        "package",
        "mine_1.models:Dep": ": mine_1.models has no 'Dep'. Did you mean 'Deep'? Correct the name",
        "mine_1.models:deep": "is a value of Deep: a subclass of torch.nn.Module is needed. Name "
        "that (docs/extending.md)",
        "mine_1.models:Deep": "has 0 linear layers that work on rows: at least one is needed, "
        "whose output is the row's. Give it a torch.nn.Linear",
        "mine-1:x": "is no import path: package.module:Name is allowed, of letters, digits and _. "
        "Correct it",
        "os:system": "is a value of builtin_function_or_method: a subclass of torch.nn.Module is "
        "needed. Name that (docs/extending.md)",
    }
    for name, end in ends.items():
        told = refusal(name)
        assert told.startswith(f"model.name = {name!r}")
        assert told.endswith(end)


def test_a_model_that_makes_something_else_than_an_output_a_row_is_refused(package: Path) -> None:
    (package / "models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Deep(nn.Linear):\n"
        "    def __init__(self, config, sizes):\n        super().__init__(4, 1)\n"
        "    def forward(self, inputs):\n"
        "        return self.made(super().forward(inputs.features_NFD('mean').sum(dim=1)))\n"
        "class Right(Deep):\n    def made(self, output):\n        return output[:, 0]\n"
        "class Columns(Deep):\n    def made(self, output):\n        return output\n"
        "class Detached(Deep):\n"
        "    def made(self, output):\n        return output[:, 0].detach()\n"
        "class Normed(Deep):\n"
        "    def __init__(self, config, sizes):\n        super().__init__(config, sizes)\n"
        "        self.norm = nn.BatchNorm1d(1)\n"
        "    def made(self, output):\n        return self.norm(output)[:, 0]\n"
        "class Frozen(Normed):\n"
        "    def __init__(self, config, sizes):\n        super().__init__(config, sizes)\n"
        "        self.norm.eval()\n"
        "class Dropped(Deep):\n"
        "    def made(self, output):\n"
        "        return nn.functional.dropout(output[:, 0], 0.5, self.training)\n"
        "class Own(Deep):\n"  # layers made late, noise and a count of its own, an extra state
        "    def __init__(self, config, sizes):\n        super().__init__(config, sizes)\n"
        "        self.noise = torch.Generator()\n"
        "        self.register_buffer('steps', torch.zeros(()), persistent=False)\n"
        "    def get_extra_state(self):\n        return torch.zeros(1)\n"
        "    def made(self, output):\n"
        "        self.late = getattr(self, 'late', None) or nn.Linear(1, 1)\n"
        "        self.steps += self.training\n"
        "        noise_N = torch.randn(len(output), generator=self.noise)\n"
        "        return self.late(output)[:, 0] + noise_N * self.training\n"
        "class Complex(Right):\n"
        "    def __init__(self, config, sizes):\n        super().__init__(config, sizes)\n"
        "        self.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64))\n"
        "class Failing(Deep):\n    def made(self, output):\n        return output.nothing\n"
    )

    def checked(name: str) -> nn.Module:
        config = ModelConfig(name=f"mine_1.models:{name}", embedding_dim=4)
        check_outputs(model := build_model(config, SIZES), config, SIZES)
        return model

    assert checked("Right").training
    for _ in range(10):  # masks differ, but not between what is compared
        checked("Dropped")
    assert checked("Own").steps == 0
    frozen = checked("Frozen")
    assert (frozen.training, frozen.norm.training) == (True, False)  # as its owner has put it
    for name, told in {
        "Columns": "makes [3, 1] of 3 rows; a tensor of [3] is needed. Correct what its forward "
        "returns",
        "Failing": "cannot score rows: AttributeError: 'Tensor' object has no attribute 'nothing'. "
        "Mend its forward; --verbose shows the line",
        "Detached": "makes outputs without a gradient, and would learn nothing. Leave out "
        ".detach(), .item() and torch.no_grad() in its forward",
        "Normed": ": the output of a row changes with other rows, as BatchNorm makes it, so that "
        "a task would learn from others. Normalise each row alone, with LayerNorm or GroupNorm",
        "Complex": "has complex weights, filter; real ones are needed. Keep pairs of real numbers, "
        "and take torch.view_as_complex of them in its forward",
    }.items():
        message = catch_message(ValueError, checked, name)
        gap = "" if told.startswith(":") else " "
        assert message == f"model.name = 'mine_1.models:{name}'{gap}{told}"


def test_options_are_those_of_the_model(package: Path) -> None:
    (package / "models.py").write_text(
        "from dataclasses import dataclass\nfrom torch import nn\n"
        "from gmeta_keys import key\n"
        "@dataclass(frozen=True)\n"
        "class Options:\n    depth: int = key(2, 'layers', min=1)\n"
        "class Deep(nn.Module):\n"
        "    Options = Options\n"
        "    def __init__(self, config, sizes, options):\n"
        "        super().__init__()\n"
        "        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(options.depth)])\n"
    )
    config = ModelConfig(name="mine_1.models:Deep", options={"depth": 3})
    built = build_model(config, SIZES)
    assert isinstance(built.layers, nn.Sequential)
    assert len(built.layers) == 3
    name = "mine_1.models:Deep"
    found = refusal(name, dept=3)
    assert found == "model.options.dept is unknown; did you mean model.options.depth?"
    assert refusal(name, depth=0).startswith("model.options.depth = 0 is too small")
    assert "model.options.depth = 'x' is not of the type" in refusal(name, depth="x")
    assert refusal("melu", depth=1) == (
        "model.options.depth is given, but model.name = 'melu' has no options. Remove it"
    )


def test_a_name_from_elsewhere_is_trusted_only_if_the_machine_knows_its_package(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "models.py").write_text("raise SystemExit('run')\n")
    registry: Registry[object] = NAMED_MODELS  # type: ignore[assignment]
    registry.check_trusted("dlrm")
    for name in ("mine_1.models:Deep", "os:system", "dlmr"):
        with pytest.raises(ValueError, match="which is not"):
            registry.check_trusted(name)
    monkeypatch.setenv("GMETA_PLUGINS", "mine_1")
    registry.check_trusted("mine_1.models:Deep")
    with pytest.raises(ValueError, match="which is not"):
        registry.check_trusted("os:system")
    assert "mine_1.models" not in sys.modules
