"""Lines of text files, as they are counted."""

from pathlib import Path

from metaio.prepare.source.text_lines import count_lines


def test_lines_are_counted_alike_in_blocks_of_any_size(tmp_path: Path) -> None:
    content = b"\r\n\n#a\r\r\n\x0bb\x85\n\n\r#c\r\n#"
    lines = content.splitlines()
    path = tmp_path / "a.csv"
    for end in (b"", b"\n", b"\r"):
        path.write_bytes(content + end)
        for size in (1, 2, 3, 5, 100):
            found = count_lines([str(path)] * 2, "utf-8", "#", size)
            comments = sum(line.startswith(b"#") for line in lines)
            assert found == (2 * len(lines), 2 * lines.count(b""), 2 * comments)
