//! Texts of recordings, as they can be shown.

/// A count with its noun.
pub fn plural(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// The text in one line of at most `most` characters; the middle of a longer one is left out.
/// Characters that control the terminal or the direction of text are replaced, as they would act on
/// other text.
pub fn one_line(text: &str, most: usize) -> String {
    let turns =
        |char| matches!(char, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let shown = |char: char| if char.is_control() || turns(char) { '\u{fffd}' } else { char };
    let length = text.chars().count();
    if length <= most {
        return text.chars().map(shown).collect();
    }
    let (start, end) = (most / 2, most.saturating_sub(most / 2 + 1));
    let ends = text.chars().take(start).chain(['…']).chain(text.chars().skip(length - end));
    ends.map(shown).collect()
}
