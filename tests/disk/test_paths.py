from hookdiff import UserError
from hookdiff.disk.paths import check_writable
from hookdiff.run_dir.layout import check_run_dir
from tests.conftest import refused


def test_a_foreign_directory_or_file_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with refused(UserError, path):
            check_run_dir(path, overwrite=True)


def test_an_unwritable_path_is_refused_without_writing(tmp_path):
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "folder" / "x.png")
    check_writable(tmp_path / "file")
    for path in (tmp_path, tmp_path / "file" / "x.png", tmp_path / "file" / "new" / "x.png"):
        with refused(UserError, path, "directory"):
            check_writable(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
