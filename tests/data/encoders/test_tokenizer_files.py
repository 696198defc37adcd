"""No call of transformers may ask to run, or run, code that lies in a model's folder."""

import ast
from pathlib import Path

import mmldlm

OWN = "MultimodalMMDiT"


def calls_without_refusal(source: str):
    """Lines of every `X.from_pretrained(...)` of a class that is not ours without
    trust_remote_code=False.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        is_own = isinstance(owner, ast.Name) and owner.id == OWN
        refused = any(
            word.arg == "trust_remote_code"
            and isinstance(word.value, ast.Constant)
            and word.value.value is False
            for word in node.keywords
        )
        if node.func.attr == "from_pretrained" and not is_own and not refused:
            yield node.lineno


def test_every_call_refuses_code():
    package = Path(mmldlm.__file__).parent
    found = [
        f"{path}:{line}"
        for path in package.rglob("*.py")
        for line in calls_without_refusal(path.read_text())
    ]
    assert found == []


def test_the_check_sees_a_call_without_it():
    assert list(
        calls_without_refusal(
            "AutoModel.from_pretrained(x)\nkind.from_pretrained(x, trust_remote_code=True)"
        )
    )
    assert not list(calls_without_refusal("AutoModel.from_pretrained(x, trust_remote_code=False)"))
