"""The bill of materials: which packages an image or a .deb is made of, as CycloneDX 1.6 JSON.

Facts: cyclonedx.org/docs/1.6/json, the package-url specification (types deb and pypi).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from scripts.packages.parts import Component


def document(
    parts: Iterable[Component], *, name: str, version: str, kind: str, digest: str, created: str
) -> str:
    """Return the document; the same parts give the same text.

    `kind` is `container` or `application`, `digest` that of the result, `created` RFC 3339.
    """
    components = [_component(one) for one in sorted(parts, key=lambda one: (one.kind, one.name))]
    subject = {
        "type": kind,
        "bom-ref": f"{name}@{digest}",
        "name": name,
        "version": version,
        "hashes": [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}],
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    whole = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {"timestamp": created, "component": subject},
        "components": components,
        "dependencies": [
            {"ref": subject["bom-ref"], "dependsOn": [one["bom-ref"] for one in components]}
        ],
    }
    return json.dumps(whole, indent=2) + "\n"


def _component(part: Component) -> dict[str, Any]:
    url = purl(part)
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": url,
        "name": part.name,
        "version": part.version,
        "purl": url,
        "hashes": [{"alg": "SHA-256", "content": part.sha256}],
    }
    if part.licence:
        found["licenses"] = [{"license": {"name": part.licence}}]
    return found


def purl(part: Component) -> str:
    """Return the package URL of a part."""
    version = quote(part.version, safe=".~-")
    if part.kind == "deb":
        return f"pkg:deb/debian/{quote(part.name, safe='')}@{version}?arch={part.arch}"
    return f"pkg:pypi/{part.name}@{version}"
