"""Turn an example in percent format (``# %%``) into the notebook beside it: one text, two forms.

python examples/make_notebook.py            writes examples/digits.ipynb
python examples/make_notebook.py --check    fails if the notebook is not what the script says
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

import nbformat

HERE = Path(__file__).parent
# What a script has and a notebook does not need: the command line. The last cell runs the job instead.
NOT_IN_NOTEBOOK = {"main"}
LAST_CELL = 'run_job("/Volumes/main/demo/digits", out="out")'
SHOW_CELL = 'from IPython.display import Image as Picture\n\nPicture(str(max(Path("out").glob("digits-*/digits.png"))))'


def cells(source: str) -> list[nbformat.NotebookNode]:
    """The cells of a script in percent format."""
    found = []
    for part in source.split("\n# %%")[1:]:
        header, _, body = part.partition("\n")
        if "[markdown]" in header:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines())
            found.append(nbformat.v4.new_markdown_cell(text))
        elif code := without_command_line(body):
            found.append(nbformat.v4.new_code_cell(code))
    found += [nbformat.v4.new_code_cell(LAST_CELL), nbformat.v4.new_code_cell(SHOW_CELL)]
    for number, cell in enumerate(found):
        cell["id"] = f"cell-{number}"
    return found


def without_command_line(code: str) -> str:
    """The code without the function that reads arguments and the ``__main__`` guard."""
    lines = code.splitlines()
    for node in reversed(ast.parse(code).body):
        guard = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        if guard or (isinstance(node, ast.FunctionDef) and node.name in NOT_IN_NOTEBOOK):
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines).strip()


def main() -> None:
    """Write the notebook, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    target = HERE / "digits.ipynb"
    notebook = nbformat.v4.new_notebook(
        cells=cells((HERE / "digits.py").read_text(encoding="utf-8")),
        metadata={"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
    )
    text = nbformat.writes(notebook) + "\n"
    if parser.parse_args().check:
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            sys.exit("examples/digits.ipynb is not what digits.py says: run python examples/make_notebook.py")
        return
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
