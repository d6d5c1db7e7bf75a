//! The grammar of option strings.
//!
//! ```text
//! conf  := [ pair { ',' pair } ]
//! pair  := name ':' value
//! value := text without commas, unless they are in brackets
//! ```
//!
//! Nothing is skipped and nothing is guessed: text that is not of this form is an error.

use super::error::{ConfigError, ConfigErrorKind, quoted};
use super::options::{Config, Row, nearest};

/// Sets the options that an option string names.
pub(super) fn apply(config: &mut Config, text: &str) -> Result<(), ConfigError> {
    if text.trim().is_empty() {
        return Ok(());
    }
    let mut depth = 0_u32;
    let is_between_pairs = |c: char| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    };
    for pair in text.split(is_between_pairs) {
        let at = |part: &str| part.trim_start().as_ptr().addr() - text.as_ptr().addr();
        let malformed = |what, part| Err(ConfigError::new(ConfigErrorKind::Malformed { what }).at(at(part)));
        let (name, value) = pair.split_once(':').map_or((pair, None), |(name, value)| (name, Some(value)));
        let key = name.trim();
        if key.is_empty() {
            return malformed("an option is missing here", pair);
        }
        let Some(value) = value else { return malformed("an option has no `:`", pair) };
        let Some(row) = Row::find(key) else {
            let kind = ConfigErrorKind::UnknownOption { key: quoted(key), nearest: nearest(key) };
            return Err(ConfigError::new(kind).at(at(name)));
        };
        if value.matches('[').count() != value.matches(']').count() {
            return malformed("the brackets of a list do not match", value);
        }
        if value.trim().is_empty() {
            return malformed("an option has no value", value);
        }
        if !(row.set)(config, value.trim()) || !row.in_range(config) {
            return Err(row.refusal(value.trim()).at(at(value)));
        }
    }
    Ok(())
}
