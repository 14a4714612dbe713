"""What the README prints runs as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(word: str) -> str:
    (found,) = [text for text in BLOCKS if word in text]
    return found


def run(tmp_path: Path, code: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(code, encoding="utf-8")
    environ = {**os.environ, "AIRDATA_VOLUMES": str(tmp_path / "volumes")}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_launch(tmp_path):
    code = block("def hello")
    expected = re.search(r"print\(.*\) +# (.*)", code)[1]
    assert expected in run(tmp_path, code)


def test_data(tmp_path, make_files):
    make_files(tmp_path / "volumes/main/demo/digits/train", 200)
    run(tmp_path, block("for paths in loader") + "\n        assert len(paths) == 64\nassert epoch == 2\n")


PREAMBLE = """
import torch, airdata
from pathlib import Path
def fresh():
    model = torch.nn.Linear(4, 2)
    loader = airdata.DataLoader(airdata.UCVolumeDataset("/Volumes/main/demo/digits", shuffle=True), batch_size=4)
    return model, torch.optim.AdamW(model.parameters()), loader
"""


def test_checkpoints(tmp_path, make_files):
    make_files(tmp_path / "volumes/main/demo/digits", 20)
    train = "next(iter(loader)); model(torch.ones(4)).sum().backward(); optimizer.step()\n"
    code = block("manager = airdata.CheckpointManager").replace("manager.save", train + "step = 7\nmanager.save")
    again = code.replace("step = 7", "assert step == 7, step")
    check = "\nmanager.wait()\nprint('position', loader.state_dict()['samples_served'])\nmanager.close()\n"
    first = PREAMBLE + "model, optimizer, loader = fresh()\n" + code + check
    second = "\nmodel, optimizer, loader = fresh()\n" + again + check
    assert re.findall(r"position (\d+)", run(tmp_path, first + second)) == ["4", "8"]


def test_storage(tmp_path):
    code = block("dcp.save").replace("s3://bucket", str(tmp_path / "bucket"))
    state = "\nmodel = torch.nn.Linear(4, 2)\nstate_dict = {'model': torch.nn.Linear(4, 2).state_dict()}\n"
    check = "\nassert torch.equal(state_dict['model']['weight'], model.weight)\n"
    run(tmp_path, PREAMBLE + state + code + check)


def test_the_page_on_data(tmp_path):
    from PIL import Image

    for number in range(200):
        file = tmp_path / f"volumes/main/demo/photos/train/{('cat', 'dog')[number % 2]}/{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(file)
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    printed = run(tmp_path, "\n".join(blocks))
    assert "0 16\n184 samples were left\n" in printed
    for comment in re.findall(r"print\(.*\) +# (.*?)(?: \.\.\.)?\n", "".join(blocks)):
        assert comment in printed


@pytest.mark.parametrize(
    "page",
    [
        str(page.relative_to(ROOT))
        for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md")))
    ],
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists(), target
