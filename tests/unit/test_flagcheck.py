"""`invoke flags`: engine, version and GPU from the text or the options, one report, one exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bringup import flagcheck, flagtable
from bringup.errors import Exit, UsageError
from bringup.flagcheck import check_line, compute_capability, model_facts, nearest


def test_the_newest_version_is_taken_when_none_is_said() -> None:
    assert check_line("vllm serve /m").version == flagtable.tables()["vllm"][-1]


def test_an_images_tag_says_the_version() -> None:
    assert check_line("docker run vllm/vllm-openai:v0.23.0 --model /m").version == "0.23.0"


def test_an_images_tag_without_a_table_is_judged_by_the_nearest_and_says_so() -> None:
    report = check_line("docker run vllm/vllm-openai:v0.25.1 --model /m")
    found = next(item for item in report.findings if item.code == "LINE_VERSION")
    assert report.version == "0.23.0"
    assert "0.25.1" in found.what


def test_nearest_is_the_newest_that_is_not_newer() -> None:
    known = ["0.23.0", "0.33.0"]
    assert [nearest(v, known) for v in ("0.1", "0.23.0", "0.30", "1.0")] == [
        "0.23.0",
        "0.23.0",
        "0.23.0",
        "0.33.0",
    ]


def test_errors_make_exit_two_and_warnings_do_not() -> None:
    assert check_line("sglang serve /m --enable-auto-tool-choice").exit is Exit.USAGE
    assert check_line("sglang serve /m --host 0.0.0.0").exit is Exit.DONE


def test_a_positional_model_counts_as_the_required_one() -> None:
    codes = {item.code for item in check_line("sglang serve /m").findings}
    assert "FLAG_REQUIRED" not in codes
    assert "FLAG_REQUIRED" in {item.code for item in check_line("sglang serve --tp-size 8").findings}


def test_the_report_is_one_json_object_without_the_line() -> None:
    report = check_line("vllm serve /m --api-key swordfish --dtype float8", gpu="h100")
    data = json.loads(json.dumps(report.as_json()))
    assert (data["schema_version"], data["engine"], data["sm"], data["errors"]) == (1, "vllm", 90, 1)
    assert "swordfish" not in json.dumps(data)
    assert data["errors"] + data["warnings"] + data["notes"] == len(data["findings"])


def test_the_report_reads_well_and_keeps_brackets() -> None:
    out = io.StringIO()
    check_line("vllm serve /m --dtype '[bold]x[/bold]'", gpu="h20-141gb").show(Console(file=out, width=200))
    text = out.getvalue()
    assert '--dtype: "[bold]x[/bold]" is not one of' in text
    assert text.splitlines()[-1].startswith("vllm 0.33.0 on h20-141gb: 1 error, 1 warning, ")


@pytest.mark.parametrize(
    ("gpu", "sm"),
    [
        ("h20", 90),
        ("h20-141gb", 90),
        ("gh200-2x", 90),
        ("NVIDIA H200", 90),
        ("a100", 80),
        ("b200", 100),
        ("sm90", 90),
        ("sm_120", 120),
        ("9.0", 90),
        ("cpu", None),
        (None, None),
    ],
)
def test_a_gpus_name_says_its_compute_capability(gpu: str | None, sm: int | None) -> None:
    assert compute_capability(gpu) == sm


def test_an_unknown_gpu_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match='unknown GPU "h21"'):
        compute_capability("h21")


@pytest.mark.parametrize(
    ("name", "sparse", "quantization"),
    [
        ("zai-org/GLM-5.2-FP8", True, "fp8"),
        ("/models/glm-5.1-fp8", True, "fp8"),
        ("cyankiwi/GLM-5.2-AWQ-INT4", True, "awq"),
        ("zai-org/GLM-4.6", False, None),
        ("deepseek-ai/DeepSeek-V3.2", True, None),
        ("deepseek-ai/DeepSeek-V3", False, None),
        ("meta-llama/Llama-3.1-8B", False, None),
        ("somebody/some-model", None, None),
    ],
)
def test_a_models_name_says_what_rules_ask(name: str, sparse: bool | None, quantization: str | None) -> None:
    facts = model_facts(name)
    assert (facts.sparse_attention, facts.quantization) == (sparse, quantization)


@pytest.mark.parametrize(
    ("line", "engine", "version", "said"),
    [
        ("--tp 8", None, None, "does not say which engine"),
        ("--tp 8", "sgl", None, 'unknown engine "sgl"'),
        ("vllm serve /m", "sglang", None, "the line starts vllm"),
        ("sglang serve /m", None, "0.0.1", "no flag table of this version"),
        ("sglang serve 'm", None, None, "never closed"),
    ],
)
def test_what_cannot_be_checked_says_why(
    line: str, engine: str | None, version: str | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        check_line(line, engine, version)


def test_renew_writes_the_table_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flagtable, "FOLDER", tmp_path / "flags")
    program = tmp_path / "llama_serve.py"
    program.write_text('def options(p):\n    p.add_argument("--ctx-size", type=int)\n')
    path = flagcheck.renew("llama-server", "7.0", program)
    assert path == tmp_path / "flags" / "llama-server-7.0.json"
    assert "--ctx-size" in flagtable.load("llama-server", "7.0").options


def test_renew_without_version_and_wheel_says_what_it_needs() -> None:
    with pytest.raises(UsageError, match="--version or --wheel"):
        flagcheck.renew("sglang")
