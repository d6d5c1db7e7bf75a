//! The grammar of option strings.
//!
//! ```text
//! conf  := [ pair { ',' pair } ]
//! pair  := name ':' ( word | list )
//! list  := '[' entry { ',' entry } ']'
//! entry := word ':' word
//! ```
//!
//! Nothing is skipped and nothing is guessed: text that is not of this form is an error at the spot
//! where it stops being so.

use std::fmt;

use super::error::{ConfigError, ConfigErrorKind, Span, quoted};
use super::options::{Row, nearest};

/// A part of an option's value, and where it stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word<'a> {
    /// The option, which messages name.
    pub(super) row: &'static Row,
    /// The whole option string, for messages.
    source: &'a str,
    span: Span,
}

impl<'a> Word<'a> {
    pub(super) fn text(self) -> &'a str {
        self.span.of(self.source)
    }

    pub(super) fn fail(self, kind: ConfigErrorKind) -> ConfigError {
        ConfigError::at(self.source, self.span, kind)
    }

    pub(super) fn invalid(self) -> ConfigError {
        self.invalid_expecting(self.row.expected.to_owned())
    }

    pub(super) fn invalid_expecting(self, expected: String) -> ConfigError {
        self.fail(ConfigErrorKind::InvalidValue { key: self.row.name(), value: quoted(self.text()), expected })
    }

    pub(super) fn out_of_range(self) -> ConfigError {
        self.out_of_range_expecting(self.row.expected.to_owned())
    }

    pub(super) fn out_of_range_expecting(self, expected: String) -> ConfigError {
        self.fail(ConfigErrorKind::OutOfRange { key: self.row.name(), value: quoted(self.text()), expected })
    }
}

/// What follows an option's colon.
#[derive(Clone, Debug)]
pub(super) enum Value<'a> {
    Word(Word<'a>),
    /// The whole list with its brackets, and names and values of its entries, of which there is at
    /// least one.
    List(Word<'a>, Vec<(Word<'a>, Word<'a>)>),
}

impl<'a> Value<'a> {
    /// The value as it was written.
    pub(super) fn whole(&self) -> Word<'a> {
        match self {
            Value::Word(word) | Value::List(word, _) => *word,
        }
    }

    /// The value, unless it is a list.
    pub(super) fn word(&self) -> Result<Word<'a>, ConfigError> {
        match self {
            Value::Word(word) => Ok(*word),
            Value::List(list, _) => Err(list.invalid()),
        }
    }
}

/// The value without whitespace between its words.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Word(word) => f.write_str(word.text()),
            Value::List(_, entries) => {
                let entries: Vec<String> =
                    entries.iter().map(|(name, value)| format!("{}:{}", name.text(), value.text())).collect();
                write!(f, "[{}]", entries.join(","))
            }
        }
    }
}

/// The values of the options of `text` in the order in which they stand.
pub(super) fn parse(text: &str) -> Result<Vec<Value<'_>>, ConfigError> {
    let mut parser = Parser { text, tokens: tokens(text), at: 0 };
    let mut values = Vec::new();
    while let Some((span, name)) = parser.next() {
        values.push(parser.option(span, name)?);
        match parser.next() {
            Some((span, ",")) if parser.at == parser.tokens.len() => {
                return Err(parser.fail(span, ConfigErrorKind::TrailingComma));
            }
            Some((_, ",")) | None => {}
            Some((span, _)) => return Err(parser.unexpected(span, "`,` and another option, or the end")),
        }
    }
    Ok(values)
}

/// The places of words and punctuation. Words are without the whitespace around them and never
/// empty. Every text has tokens: what is wrong with them is for the parser to say.
fn tokens(text: &str) -> Vec<Span> {
    let mut tokens = Vec::new();
    let mut start = 0;
    let marks = text.match_indices([':', ',', '[', ']']).map(|(at, _)| Span { start: at, end: at + 1 });
    for mark in marks.chain([Span { start: text.len(), end: text.len() }]) {
        let raw = Span { start, end: mark.start }.of(text);
        let word_start = start + (raw.len() - raw.trim_start().len());
        let word = Span { start: word_start, end: word_start + raw.trim().len() };
        tokens.extend([word, mark].into_iter().filter(|span| span.start < span.end));
        start = mark.end;
    }
    tokens
}

fn is_word(token: &str) -> bool {
    !matches!(token, ":" | "," | "[" | "]")
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<Span>,
    at: usize,
}

impl<'a> Parser<'a> {
    /// The option whose name is this token.
    fn option(&mut self, span: Span, name: &'a str) -> Result<Value<'a>, ConfigError> {
        match name {
            "," | ":" => return Err(self.fail(span, ConfigErrorKind::EmptyPair)),
            "[" | "]" => return Err(self.unexpected(span, "an option, `name:value`")),
            _ => {}
        }
        let Some(row) = Row::find(name) else {
            let kind = ConfigErrorKind::UnknownOption { key: quoted(name), nearest: nearest(name) };
            return Err(self.fail(span, kind));
        };
        self.colon(span)?;
        match self.peek() {
            Some((open, "[")) => self.list(row, open),
            _ => Ok(Value::Word(self.value(row, name, row.expected)?)),
        }
    }

    fn list(&mut self, row: &'static Row, open: Span) -> Result<Value<'a>, ConfigError> {
        let unclosed = |parser: &Parser<'_>| parser.fail(open, ConfigErrorKind::UnclosedList { key: row.name() });
        self.at += 1;
        let mut entries = Vec::new();
        loop {
            let Some((span, name)) = self.next() else { return Err(unclosed(self)) };
            if !is_word(name) {
                return Err(self.unexpected(span, "an entry of the list, `name:value`"));
            }
            if self.peek().is_none() {
                return Err(unclosed(self));
            }
            self.colon(span)?;
            if self.peek().is_none() {
                return Err(unclosed(self));
            }
            entries.push((Word { row, source: self.text, span }, self.value(row, name, "a word")?));
            match self.next() {
                Some((_, ",")) => {}
                Some((close, "]")) => {
                    let span = Span { start: open.start, end: close.end };
                    return Ok(Value::List(Word { row, source: self.text, span }, entries));
                }
                Some((span, _)) => return Err(self.unexpected(span, "`,` or `]`")),
                None => return Err(unclosed(self)),
            }
        }
    }

    /// Takes the colon after the name at `span`.
    fn colon(&mut self, span: Span) -> Result<(), ConfigError> {
        match self.next() {
            Some((_, ":")) => Ok(()),
            _ => Err(self.fail(span, ConfigErrorKind::MissingColon { key: quoted(span.of(self.text)) })),
        }
    }

    /// Takes the word after the colon of `name`.
    fn value(&mut self, row: &'static Row, name: &str, expected: &str) -> Result<Word<'a>, ConfigError> {
        let span = match self.next() {
            Some((span, ":" | "[")) => return Err(self.unexpected(span, "a value")),
            Some((span, word)) if is_word(word) => return Ok(Word { row, source: self.text, span }),
            Some((span, _)) => span,
            None => Span { start: self.text.len(), end: self.text.len() },
        };
        let kind = ConfigErrorKind::MissingValue { key: quoted(name), expected: expected.to_owned() };
        Err(self.fail(span, kind))
    }

    fn peek(&self) -> Option<(Span, &'a str)> {
        self.tokens.get(self.at).map(|span| (*span, span.of(self.text)))
    }

    fn next(&mut self) -> Option<(Span, &'a str)> {
        let token = self.peek()?;
        self.at += 1;
        Some(token)
    }

    fn fail(&self, span: Span, kind: ConfigErrorKind) -> ConfigError {
        ConfigError::at(self.text, span, kind)
    }

    fn unexpected(&self, span: Span, expected: &'static str) -> ConfigError {
        self.fail(span, ConfigErrorKind::Unexpected { found: quoted(span.of(self.text)), expected })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_lose_only_the_whitespace_around_them() {
        let text = " a b :\t[1 : 2] ,é";
        let words: Vec<&str> = tokens(text).iter().map(|token| token.of(text)).collect();
        assert_eq!(words, ["a b", ":", "[", "1", ":", "2", "]", ",", "é"]);
        assert_eq!(tokens(text)[0], Span { start: 1, end: 4 });
    }

    #[test]
    fn whitespace_alone_has_no_tokens() {
        assert_eq!(tokens(""), []);
        assert_eq!(tokens(" \t\n\u{a0}"), []);
    }
}
