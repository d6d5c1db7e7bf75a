//! What can be wrong with options, and where in the string it stands.

use std::fmt::Write as _;
use std::ops::Range;

/// A byte range of the option string; both ends lie on character boundaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Span {
    /// The text under the span; empty if the span is not one of this text.
    pub(super) fn of(self, text: &str) -> &str {
        text.get(self.start..self.end).unwrap_or_default()
    }
}

/// Why options were refused, and the spot in the option string that is to blame.
///
/// Displayed, it names the environment variable (if one was read) and the fault, then shows the
/// string with a caret under the spot:
///
/// ```text
/// AQUIFER_ALLOC_CONF: unknown option `limits_mb` (at byte 0); did you mean `limit_mb`?
///   limits_mb:40
///   ^^^^^^^^^
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.render())]
pub struct ConfigError(Box<Details>);

aquifer_device::debug_as_display!(ConfigError);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Details {
    kind: ConfigErrorKind,
    spot: Option<(String, Span)>,
    variable: Option<&'static str>,
}

/// What is wrong with an option string or a [`Config`](super::Config).
///
/// Keys and values found in the text are given without control characters and cut to at most 60
/// characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigErrorKind {
    /// No option has this name.
    #[error("unknown option `{key}`")]
    UnknownOption {
        /// The name that was given.
        key: String,
        /// The known option that is spelled almost like it, if there is one.
        nearest: Option<&'static str>,
    },
    /// Nothing stands where an option was expected: at the start, between two commas, or before a
    /// colon.
    #[error("an option is missing here; expected `name:value`")]
    EmptyPair,
    /// The string ends with a comma.
    #[error("a comma at the end; expected another `name:value` after it, or no comma")]
    TrailingComma,
    /// An option's name is not followed by a colon.
    #[error("`{key}` has no `:` after it; expected `{key}:value`")]
    MissingColon {
        /// The name, of an option or of an entry of a list.
        key: String,
    },
    /// An option's colon is not followed by a value.
    #[error("`{key}` has no value; expected {expected}")]
    MissingValue {
        /// The name, of an option or of an entry of a list.
        key: String,
        /// What the value may be.
        expected: String,
    },
    /// Text that cannot stand where it does: a second value, a stray bracket.
    #[error("`{found}` cannot stand here; expected {expected}")]
    Unexpected {
        /// What was found.
        found: String,
        /// What may stand there.
        expected: &'static str,
    },
    /// A list has no `]`.
    #[error("the list of `{key}` is not closed; expected `]`")]
    UnclosedList {
        /// The option that the list belongs to.
        key: &'static str,
    },
    /// The value is not of the form that the option takes.
    #[error("`{value}` is not a value of `{key}`; expected {expected}")]
    InvalidValue {
        /// The option.
        key: &'static str,
        /// The value that was given.
        value: String,
        /// What the value may be.
        expected: String,
    },
    /// The value has the right form and lies outside the option's range.
    #[error("`{key}` is {value}, out of range; expected {expected}")]
    OutOfRange {
        /// The option.
        key: &'static str,
        /// The value that was given.
        value: String,
        /// The range, or the values that are allowed.
        expected: String,
    },
    /// The value is known and nothing here provides what it asks for.
    #[error("`{key}:{value}` is not available in this version; {instead}")]
    Unavailable {
        /// The option.
        key: &'static str,
        /// The value that was given.
        value: String,
        /// What to use instead.
        instead: &'static str,
    },
    /// An environment variable holds something that is not Unicode.
    #[error("the value is not Unicode text")]
    NotUnicode,
}

impl ConfigError {
    pub(super) fn new(kind: ConfigErrorKind) -> ConfigError {
        ConfigError(Box::new(Details { kind, spot: None, variable: None }))
    }

    pub(super) fn at(text: &str, span: Span, kind: ConfigErrorKind) -> ConfigError {
        ConfigError(Box::new(Details { kind, spot: Some((text.to_owned(), span)), variable: None }))
    }

    pub(super) fn read_from(mut self, variable: &'static str) -> ConfigError {
        self.0.variable = Some(variable);
        self
    }

    /// What is wrong.
    pub fn kind(&self) -> &ConfigErrorKind {
        &self.0.kind
    }

    /// The environment variable that the option string came from, if it came from one.
    pub fn variable(&self) -> Option<&'static str> {
        self.0.variable
    }

    /// The option string; absent if the fault is in values that were set in code.
    pub fn text(&self) -> Option<&str> {
        self.0.spot.as_ref().map(|(text, _)| text.as_str())
    }

    /// Where in the option string the fault begins, in bytes from its start.
    pub fn offset(&self) -> Option<usize> {
        self.span().map(|span| span.start)
    }

    /// The bytes of the option string that are at fault; empty where something is missing.
    pub fn span(&self) -> Option<Range<usize>> {
        self.0.spot.as_ref().map(|(_, span)| span.start..span.end)
    }

    fn render(&self) -> String {
        let mut out = String::new();
        if let Some(variable) = self.0.variable {
            let _ = write!(out, "{variable}: ");
        }
        let _ = write!(out, "{}", self.0.kind);
        if let Some((_, span)) = &self.0.spot {
            let _ = write!(out, " (at byte {})", span.start);
        }
        if let ConfigErrorKind::UnknownOption { nearest: Some(nearest), .. } = &self.0.kind {
            let _ = write!(out, "; did you mean `{nearest}`?");
        }
        if let Some((text, span)) = &self.0.spot {
            out.push_str(&point_at(text, *span));
        }
        out
    }
}

/// The most characters of the option string that are shown, and how many of them stand before the
/// spot.
const SHOWN: usize = 100;
const SHOWN_BEFORE: usize = 40;

/// Two lines: the text, cut to what surrounds the spot, and carets below the spot. Both begin with
/// a line break.
fn point_at(text: &str, span: Span) -> String {
    let column = Span { start: 0, end: span.start }.of(text).chars().count();
    let width = span.of(text).chars().count();
    let total = text.chars().count();
    let first = if total <= SHOWN { 0 } else { column.saturating_sub(SHOWN_BEFORE) };
    let last = total.min(first + SHOWN);

    let before = if first > 0 { "…" } else { "" };
    let after = if last < total { "…" } else { "" };
    let line: String = text.chars().skip(first).take(last - first).map(printable).collect();
    let indent = column - first + before.chars().count();
    let carets = width.min(last.saturating_sub(column)).max(1);
    format!("\n  {before}{line}{after}\n  {}{}", " ".repeat(indent), "^".repeat(carets))
}

/// Text from an option string as messages quote it: one line, at most 60 characters.
pub(super) fn quoted(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut out: String = text.chars().take(LONGEST).map(printable).collect();
    if text.chars().nth(LONGEST).is_some() {
        out.pop();
        out.push('…');
    }
    out
}

fn printable(c: char) -> char {
    if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') { ' ' } else { c }
}
