"""The chart's CustomResourceDefinition is the one that follows from the classes."""

from tests.support.crd import COLUMNS, FILE, definition, text


def test_the_file_is_what_is_generated() -> None:
    """scripts/schema writes it."""
    assert FILE.read_text() == text()


def test_columns_exist() -> None:
    """What `kubectl get` prints is a field of the status."""
    (version,) = definition()["spec"]["versions"]
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]
    for _, _, path, _ in COLUMNS:
        assert path.split("[")[0].split(".")[2] in status["properties"], path
