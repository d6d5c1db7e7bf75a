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

use super::error::{ConfigError, ConfigErrorKind, quoted};
use super::keys::{Key, nearest};
use super::tokens::{Span, Token, TokenKind, tokenize};

/// A word of the option string and where it stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word<'a> {
    /// The whole option string, for messages.
    pub(super) source: &'a str,
    pub(super) span: Span,
}

impl<'a> Word<'a> {
    pub(super) fn text(self) -> &'a str {
        self.span.of(self.source)
    }

    pub(super) fn fail(self, kind: ConfigErrorKind) -> ConfigError {
        ConfigError::at(self.source, self.span, kind)
    }
}

/// What follows an option's colon.
#[derive(Clone, Debug)]
pub(super) enum Value<'a> {
    Word(Word<'a>),
    /// The whole list with its brackets, and its entries, of which there is at least one.
    List(Word<'a>, Vec<Entry<'a>>),
}

impl<'a> Value<'a> {
    /// The value as it was written.
    pub(super) fn whole(&self) -> Word<'a> {
        match self {
            Value::Word(word) | Value::List(word, _) => *word,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<'a> {
    pub(super) name: Word<'a>,
    pub(super) value: Word<'a>,
}

/// One option with its value.
#[derive(Clone, Debug)]
pub(super) struct Pair<'a> {
    pub(super) key: Key,
    pub(super) value: Value<'a>,
}

/// The options of `text` in the order in which they stand.
pub(super) fn parse(text: &str) -> Result<Vec<Pair<'_>>, ConfigError> {
    let mut parser = Parser { text, tokens: tokenize(text), at: 0 };
    let mut pairs = Vec::new();
    if parser.peek().is_none() {
        return Ok(pairs);
    }
    loop {
        pairs.push(parser.pair()?);
        let Some(after) = parser.next() else { return Ok(pairs) };
        if after.kind != TokenKind::Comma {
            return Err(parser.unexpected(after, "`,` and another option, or the end"));
        }
        if parser.peek().is_none() {
            return Err(parser.fail(after.span, ConfigErrorKind::TrailingComma));
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<Token>,
    at: usize,
}

impl<'a> Parser<'a> {
    fn pair(&mut self) -> Result<Pair<'a>, ConfigError> {
        let name = match self.next() {
            Some(token) if token.kind == TokenKind::Word => self.word(token),
            Some(token) if matches!(token.kind, TokenKind::Comma | TokenKind::Colon) => {
                return Err(self.fail(token.span, ConfigErrorKind::EmptyPair));
            }
            Some(token) => return Err(self.unexpected(token, "an option, `name:value`")),
            None => return Err(self.fail(self.end(), ConfigErrorKind::EmptyPair)),
        };
        let Some(key) = Key::from_name(name.text()) else {
            let kind = ConfigErrorKind::UnknownOption { key: quoted(name.text()), nearest: nearest(name.text()) };
            return Err(name.fail(kind));
        };
        self.colon(name)?;
        let value = match self.peek() {
            Some(token) if token.kind == TokenKind::Open => self.list(key)?,
            _ => Value::Word(self.value(name, key.expected())?),
        };
        Ok(Pair { key, value })
    }

    fn list(&mut self, key: Key) -> Result<Value<'a>, ConfigError> {
        let start = self.next().map_or(self.text.len(), |open| open.span.start);
        let mut entries = Vec::new();
        loop {
            let Some(token) = self.next() else { return Err(self.unclosed(key, start)) };
            if token.kind != TokenKind::Word {
                return Err(self.unexpected(token, "an entry of the list, `name:value`"));
            }
            let name = self.word(token);
            if self.peek().is_none() {
                return Err(self.unclosed(key, start));
            }
            self.colon(name)?;
            if self.peek().is_none() {
                return Err(self.unclosed(key, start));
            }
            entries.push(Entry { name, value: self.value(name, "a word")? });
            match self.next() {
                Some(token) if token.kind == TokenKind::Comma => {}
                Some(token) if token.kind == TokenKind::Close => {
                    let span = Span::new(start, token.span.end);
                    return Ok(Value::List(Word { source: self.text, span }, entries));
                }
                Some(token) => return Err(self.unexpected(token, "`,` or `]`")),
                None => return Err(self.unclosed(key, start)),
            }
        }
    }

    fn colon(&mut self, name: Word<'a>) -> Result<(), ConfigError> {
        match self.next() {
            Some(token) if token.kind == TokenKind::Colon => Ok(()),
            _ => Err(name.fail(ConfigErrorKind::MissingColon { key: quoted(name.text()) })),
        }
    }

    /// The word after the colon of `name`.
    fn value(&mut self, name: Word<'a>, expected: &str) -> Result<Word<'a>, ConfigError> {
        let missing = |span| {
            let kind = ConfigErrorKind::MissingValue { key: quoted(name.text()), expected: expected.to_owned() };
            Err(ConfigError::at(self.text, span, kind))
        };
        let Some(token) = self.peek() else { return missing(self.end()) };
        match token.kind {
            TokenKind::Word => {
                self.at += 1;
                Ok(self.word(token))
            }
            TokenKind::Comma | TokenKind::Close => missing(token.span),
            TokenKind::Colon | TokenKind::Open => Err(self.unexpected(token, "a value")),
        }
    }

    fn peek(&self) -> Option<Token> {
        self.tokens.get(self.at).copied()
    }

    fn next(&mut self) -> Option<Token> {
        let token = self.peek()?;
        self.at += 1;
        Some(token)
    }

    fn word(&self, token: Token) -> Word<'a> {
        Word { source: self.text, span: token.span }
    }

    /// The empty span after the text.
    fn end(&self) -> Span {
        Span::new(self.text.len(), self.text.len())
    }

    fn fail(&self, span: Span, kind: ConfigErrorKind) -> ConfigError {
        ConfigError::at(self.text, span, kind)
    }

    fn unexpected(&self, token: Token, expected: &'static str) -> ConfigError {
        let found = quoted(token.span.of(self.text));
        self.fail(token.span, ConfigErrorKind::Unexpected { found, expected })
    }

    /// Points at the bracket that was opened.
    fn unclosed(&self, key: Key, start: usize) -> ConfigError {
        let span = Span::new(start, (start + 1).min(self.text.len()));
        self.fail(span, ConfigErrorKind::UnclosedList { key: key.name() })
    }
}
