"""`atoll --version` says which commit of a clone it is of, and asks git for nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.comm.build_info import CLONE, git_version, installed_version


def git(clone: Path, *words: str) -> None:
    who = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    subprocess.run(["git", "-C", str(clone), *who, *words], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--message", "one")
    return tmp_path


def test_a_commit_is_told_by_the_newest_tag_before_it(clone: Path) -> None:
    assert len(git_version(clone)) >= 7, "without a tag: the commit alone"
    git(clone, "tag", "v0.1.0")
    assert git_version(clone) == "v0.1.0"
    (clone / "file").write_text("two")
    assert git_version(clone) == "v0.1.0-dirty"
    git(clone, "commit", "--all", "--message", "two")
    assert git_version(clone).startswith("v0.1.0-1-g")


def test_another_repository_that_a_hook_names_is_not_asked(
    clone: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(clone, "tag", "v0.1.0")
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    assert git_version(clone) == "v0.1.0"


def test_without_a_clone_or_a_git_that_answers_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_version(tmp_path) == ""
    (tmp_path / ".git").write_text("no repository")
    assert git_version(tmp_path) == ""
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert git_version(CLONE) == ""


def test_the_command_says_both_and_git_is_asked_by_it_alone(tmp_path: Path) -> None:
    (tmp_path / "git").write_text('#!/bin/sh\necho asked >> "$0.log"\necho v9.9.9\n')
    (tmp_path / "git").chmod(0o755)
    found = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-P", "-m", "atoll.comm.cli"]
    subprocess.run([*command, "--help"], env=found, check=True, capture_output=True)
    assert not (tmp_path / "git.log").exists()
    said = subprocess.run([*command, "--version"], env=found, check=True, capture_output=True, text=True).stdout
    commit = " (v9.9.9)" if (CLONE / ".git").exists() else ""
    assert said == f"atoll, version {installed_version()}{commit}\n"
