//! Errors about files of tensors and sets of parameters.

use std::fmt;

/// The text of all differences that prevent loading files into a set.
pub(crate) fn mismatch(missing: &[String], unexpected: &[String], different: &[String]) -> String {
    let parts = [
        (missing, "missing from the files: "),
        (unexpected, "missing from the set: "),
        (different, "not of one shape and kind: "),
    ];
    let named = parts.iter().filter(|(names, _)| !names.is_empty());
    let named: Vec<String> = named.map(|(names, what)| format!("{what}{}", Listed(names))).collect();
    format!("files and set have different tensors: {}", named.join("; "))
}

/// A list in a message, cut after the first items.
pub(crate) struct Listed<'a, T>(pub(crate) &'a [T]);

impl<T: fmt::Display> fmt::Display for Listed<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LISTED: usize = 10;
        for (position, item) in self.0.iter().take(LISTED).enumerate() {
            let between = if position > 0 { ", " } else { "" };
            write!(f, "{between}{item}")?;
        }
        match self.0.len().saturating_sub(LISTED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
