"""Any JSON value, for property tests: edges of the number types and lone surrogates included."""

from __future__ import annotations

import math

from hypothesis import strategies as st

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63 - 1, 2**63, -(2**63), 2**53 + 1, 0.5, -0.0, math.inf])
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["\ud800", "a\udfff"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=6,
)
