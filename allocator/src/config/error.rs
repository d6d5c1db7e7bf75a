//! What can be wrong with options.

use std::fmt;

/// Why options were refused, and where in the option string.
///
/// Displayed, it names the environment variable (if one was read), the fault and the place:
/// ``AQUIFER_ALLOC_CONF: unknown option `limits_mb`; did you mean `limit_mb`? (at byte 0)``.
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigError(Box<Details>);

aquifer_device::debug_as_display!(ConfigError);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Details {
    kind: ConfigErrorKind,
    offset: Option<usize>,
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
    #[error("unknown option `{key}`{}", suggestion(*nearest))]
    UnknownOption {
        /// The name that was given.
        key: String,
        /// The known option that is spelled almost like it, if there is one.
        nearest: Option<&'static str>,
    },
    /// The text is not a list of `name:value` pairs.
    #[error("{what}; expected `name:value` pairs with commas between them")]
    Malformed {
        /// The fault.
        what: &'static str,
    },
    /// The option does not take this value.
    #[error("`{value}` is not a value of `{key}`; expected {expected}")]
    InvalidValue {
        /// The option.
        key: &'static str,
        /// The value that was given.
        value: String,
        /// What the value may be.
        expected: &'static str,
    },
    /// An environment variable holds something that is not Unicode.
    #[error("the value is not Unicode text")]
    NotUnicode,
}

fn suggestion(nearest: Option<&'static str>) -> String {
    nearest.map_or_else(String::new, |nearest| format!("; did you mean `{nearest}`?"))
}

impl ConfigError {
    pub(super) fn new(kind: ConfigErrorKind) -> ConfigError {
        ConfigError(Box::new(Details { kind, offset: None, variable: None }))
    }

    pub(super) fn at(mut self, offset: usize) -> ConfigError {
        self.0.offset = Some(offset);
        self
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

    /// Where in the option string the fault begins, in bytes from its start; absent if the fault is
    /// in values that were set in code.
    pub fn offset(&self) -> Option<usize> {
        self.0.offset
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Details { kind, offset, variable } = &*self.0;
        variable.map_or(Ok(()), |variable| write!(f, "{variable}: "))?;
        write!(f, "{kind}")?;
        offset.map_or(Ok(()), |offset| write!(f, " (at byte {offset})"))
    }
}

impl std::error::Error for ConfigError {}

/// Text from an option string as messages quote it: one line, at most 60 characters.
pub(super) fn quoted(text: &str) -> String {
    const LONGEST: usize = 60;
    let is_line_break = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    let mut out = text.chars().take(LONGEST).collect::<String>().replace(is_line_break, " ");
    if text.chars().nth(LONGEST).is_some() {
        out.pop();
        out.push('…');
    }
    out
}
