//! Programs with a known answer, by rule.
