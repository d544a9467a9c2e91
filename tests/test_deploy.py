"""The files in deploy/, the Dockerfile and the constraints: they parse, what they refer to exists, and every metric of the
dashboard is one of the server's. Images are not built here; nginx and systemd check their files where they are installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from onedraw.llm.llm import idle_stats
from onedraw.server.config import ApiKey, ServerOptions
from tests.server.running import fake_llm, serving

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "onedraw.json"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
FUNCTIONS = {"sum", "max", "rate", "histogram_quantile", "by", "ignoring", "group_left", "label_values"}
LABELS = {"model_name", "le", "finished_reason", "position", "key", "limit"}


def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", sorted(DEPLOY.rglob("*.yaml")), ids=lambda file: file.name)
def test_a_yaml_file_parses(file: Path) -> None:
    assert isinstance(load(file), dict)


def expressions(dashboard: dict[str, Any]) -> list[str]:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [*queries, *(variable["query"]["query"] for variable in dashboard["templating"]["list"])]


def names(expression: str) -> set[str]:
    """The metrics in a query of Prometheus."""
    bare = re.sub(r'"[^"]*"|\$\w+', " ", expression)
    return set(re.findall(r"[a-z_][a-z0-9_]*", bare)) - FUNCTIONS - LABELS


def test_every_metric_of_the_dashboard_is_one_of_the_server() -> None:
    used = set().union(*(names(expression) for expression in expressions(json.loads(DASHBOARD.read_text(encoding="utf-8")))))
    assert len(used) > 20
    with fake_llm() as llm, serving(llm, ServerOptions(api_keys=(ApiKey("team", "secret"),), key_requests=1)) as served:
        served.http.headers["authorization"] = "Bearer secret"
        served.post("/v1/completions", prompt=[5] * 40, max_tokens=7, ignore_eos=True)
        idle_stats(llm)
        families = list(text_string_to_metric_families(served.get("/metrics").text))
    samples = {sample.name for family in families for sample in family.samples}
    counters = {f"{family.name}_total" for family in families if family.type == "counter"}  # also those without a sample so far
    assert used - samples - counters == set()
    labels = set().union(*(sample.labels for family in families for sample in family.samples))
    grouped = set(re.findall(r"by \((\w+)", " ".join(expressions(json.loads(DASHBOARD.read_text(encoding="utf-8"))))))
    assert grouped - labels <= {"position", "key"}  # of metrics that have no sample before the first draft, or refusal


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_compose_files_refer_to_files_volumes_and_stages_that_exist() -> None:
    compose, cuda = load(DEPLOY / "compose.yaml"), load(DEPLOY / "compose.cuda.yaml")
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.M))
    assert {compose["services"]["onedraw"]["build"]["target"], cuda["services"]["onedraw"]["build"]["target"]} <= stages
    assert (DEPLOY / compose["services"]["onedraw"]["build"]["context"]).resolve() == ROOT
    mounts = [mount.split(":")[0] for service in compose["services"].values() for mount in service.get("volumes", [])]
    assert [mount for mount in mounts if not (mount in compose["volumes"] or (DEPLOY / mount).exists())] == []
    assert all(port.startswith("127.0.0.1:") for service in compose["services"].values() for port in service["ports"])
    (job,) = load(DEPLOY / "prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["onedraw:8000"]}]
    (source,) = load(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}


def test_the_dockerfile_copies_what_the_build_context_has() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M) for name in line.split()]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored


def test_the_extras_that_are_installed_exist() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pages = [ROOT / "Dockerfile", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    wanted = {
        extra
        for page in pages
        for group in re.findall(r"'(?:\.|onedraw)\[([a-z,]+)\]'", page.read_text())
        for extra in group.split(",")
    }
    assert wanted
    assert {extra for extra in wanted if not re.search(rf"^{extra} = \[", text, re.M)} == set()


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_both_files_of_constraints_can_be_used_together() -> None:
    """torch for CUDA asks for one version of NVRTC; another pin made every installation on a machine with CUDA fail."""
    common, cuda = pins("constraints.txt"), pins("constraints-cuda.txt")
    assert {name for name in common.keys() & cuda.keys() if common[name] != cuda[name]} == set()
    assert cuda["nvidia-cuda-nvrtc"].startswith(cuda["cuda-toolkit"].rpartition(".")[0].rpartition(".")[0])
    assert f"torch {common['torch']}" in (ROOT / "constraints-cuda.txt").read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.skipif(not (shutil.which("nginx") and shutil.which("openssl")), reason="nginx or openssl is not installed")
def test_nginx_accepts_its_file(tmp_path: Path) -> None:
    key, certificate = tmp_path / "privkey.pem", tmp_path / "fullchain.pem"
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=llm.example.com"]
    subprocess.run([*new, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    site = (DEPLOY / "nginx" / "onedraw.conf").read_text(encoding="utf-8").replace("/etc/ssl/onedraw", str(tmp_path))
    (tmp_path / "site.conf").write_text(site)
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
        f"http {{ access_log off; include {tmp_path}/site.conf; }}\n"
    )
    done = subprocess.run(["nginx", "-t", "-c", str(tmp_path / "nginx.conf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (
        (DEPLOY / "systemd" / "onedraw.service").read_text(encoding="utf-8").replace("/opt/onedraw/venv/bin/onedraw", "/bin/true")
    )
    (tmp_path / "onedraw.service").write_text(unit)
    done = subprocess.run(["systemd-analyze", "verify", str(tmp_path / "onedraw.service")], capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "onedraw" in line]) == (0, [])
