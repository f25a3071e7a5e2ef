"""Misspelt names are detected from transformers' sources, and no existing name is refused."""

import re
import subprocess
import sys

import pytest

from fxpart.capture.models.architecture import _config_keys, _unlisted_keys, model_class
from fxpart.capture.models.misspelt import refuse_misspelt
from fxpart.errors import SpecError


@pytest.mark.parametrize(
    "name", ["ConditionalDetrModel", "GPT2LMHeadModel", "Qwen3MoeForCausalLM", "CLIPModel"]
)
def test_no_key_accepted_by_a_class_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = model_class(name)
    keys = _config_keys(cls.config_class) | _unlisted_keys(cls)
    monkeypatch.delitem(sys.modules, "transformers")
    refuse_misspelt(name, dict.fromkeys(keys))


def test_a_class_and_a_key_are_suggested_without_an_import() -> None:
    code = (
        "import sys\n"
        "from fxpart.capture.models.misspelt import refuse_misspelt\n"
        "from fxpart.errors import SpecError\n"
        "for asked in (('LlamaForCausalM', {}), ('GPT2Model', {'n_layers': 2})):\n"
        "    try:\n"
        "        refuse_misspelt(*asked)\n"
        "    except SpecError as error:\n"
        "        print(error)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("architecture=LlamaForCausalM is not in transformers ")
    assert "nearest: LlamaForCausalLM" in first
    assert second == (
        "config.n_layers is not a key of GPT2Model's configuration; nearest: n_layer, n_inner"
    )


def test_names_exported_elsewhere_are_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "transformers")
    refuse_misspelt("AutoModel", {})
    with pytest.raises(SpecError, match="nearest: T5Model"):
        refuse_misspelt("T5Modell", {})
    for word in ("License", "TYPE_CHECKING", "MODEL_FOR_CAUSAL_LM_MAPPING"):
        with pytest.raises(SpecError, match="is not in transformers") as refused:
            refuse_misspelt(word, {})
        assert not re.search(rf"(nearest:|,) {word}", str(refused.value))
