//! Splitting an option string into words and punctuation, each with its place in the text.

/// A byte range of the option string; both ends lie on character boundaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Span {
    pub(super) fn new(start: usize, end: usize) -> Span {
        Span { start, end }
    }

    /// The text under the span; empty if the span is not one of this text.
    pub(super) fn of(self, text: &str) -> &str {
        text.get(self.start..self.end).unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// Anything between punctuation, without the whitespace around it; never empty.
    Word,
    Colon,
    Comma,
    Open,
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) kind: TokenKind,
    pub(super) span: Span,
}

/// The tokens of `text` in order. Every text has tokens: what is wrong with them is for the parser
/// to say.
pub(super) fn tokenize(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut word_start = 0;
    for (at, c) in text.char_indices() {
        let kind = match c {
            ':' => TokenKind::Colon,
            ',' => TokenKind::Comma,
            '[' => TokenKind::Open,
            ']' => TokenKind::Close,
            _ => continue,
        };
        push_word(&mut tokens, text, Span::new(word_start, at));
        tokens.push(Token { kind, span: Span::new(at, at + 1) });
        word_start = at + 1;
    }
    push_word(&mut tokens, text, Span::new(word_start, text.len()));
    tokens
}

fn push_word(tokens: &mut Vec<Token>, text: &str, raw: Span) {
    let raw_text = raw.of(text);
    let start = raw.start + (raw_text.len() - raw_text.trim_start().len());
    let word = raw_text.trim();
    if !word.is_empty() {
        tokens.push(Token { kind: TokenKind::Word, span: Span::new(start, start + word.len()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_lose_only_the_whitespace_around_them() {
        let text = " a b :\t[1 : 2] ,é";
        let words: Vec<&str> = tokenize(text).iter().map(|token| token.span.of(text)).collect();
        assert_eq!(words, ["a b", ":", "[", "1", ":", "2", "]", ",", "é"]);
        assert_eq!(tokenize(text)[0].span, Span::new(1, 4));
    }

    #[test]
    fn whitespace_alone_has_no_tokens() {
        assert_eq!(tokenize(""), []);
        assert_eq!(tokenize(" \t\n\u{a0}"), []);
    }
}
