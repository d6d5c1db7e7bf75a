//! Reading one value: numbers, sizes, fractions, choices and the two kinds of list.
//!
//! A value is taken as a whole or refused. Numbers are digits only: no sign, no hexadecimal,
//! nothing after them.

use std::ops::Bound;

use super::error::{ConfigError, ConfigErrorKind, quoted};
use super::keys::Key;
use super::parse::{Entry, Pair, Value, Word};

/// Bytes in a MiB, the unit of every `_mb` option.
pub(super) const MIB: u64 = 1 << 20;

/// An option's value with the option it belongs to, which messages name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    key: Key,
    word: Word<'a>,
}

impl<'a> Reader<'a> {
    /// The single word that `pair` must have as its value.
    pub(super) fn word_of(pair: &Pair<'a>) -> Result<Reader<'a>, ConfigError> {
        let reader = Reader { key: pair.key, word: pair.value.whole() };
        match pair.value {
            Value::Word(_) => Ok(reader),
            Value::List(..) => Err(reader.invalid()),
        }
    }

    /// The entries of the list that `pair` must have as its value.
    pub(super) fn list_of<'p>(pair: &'p Pair<'a>) -> Result<&'p [Entry<'a>], ConfigError> {
        match &pair.value {
            Value::List(_, entries) => Ok(entries),
            Value::Word(word) => Err(Reader { key: pair.key, word: *word }.invalid()),
        }
    }

    /// A part of the value of `key`.
    pub(super) fn part(key: Key, word: Word<'a>) -> Reader<'a> {
        Reader { key, word }
    }

    pub(super) fn text(self) -> &'a str {
        self.word.text()
    }

    pub(super) fn invalid(self) -> ConfigError {
        self.invalid_expecting(self.key.expected().to_owned())
    }

    pub(super) fn invalid_expecting(self, expected: String) -> ConfigError {
        let kind = ConfigErrorKind::InvalidValue { key: self.key.name(), value: quoted(self.text()), expected };
        self.word.fail(kind)
    }

    pub(super) fn out_of_range(self) -> ConfigError {
        self.out_of_range_expecting(self.key.expected().to_owned())
    }

    fn out_of_range_expecting(self, expected: String) -> ConfigError {
        let kind = ConfigErrorKind::OutOfRange { key: self.key.name(), value: quoted(self.text()), expected };
        self.word.fail(kind)
    }

    pub(super) fn unavailable(self, instead: &'static str) -> ConfigError {
        self.word.fail(ConfigErrorKind::Unavailable { key: self.key.name(), value: quoted(self.text()), instead })
    }

    pub(super) fn flag(self) -> Result<bool, ConfigError> {
        let hint = match self.text() {
            "True" => return Ok(true),
            "False" => return Ok(false),
            "1" => "True",
            "0" => "False",
            text if ["true", "yes", "on"].iter().any(|word| text.eq_ignore_ascii_case(word)) => "True",
            text if ["false", "no", "off"].iter().any(|word| text.eq_ignore_ascii_case(word)) => "False",
            _ => return Err(self.invalid()),
        };
        Err(self.invalid_expecting(format!("{}; write `{hint}`", self.key.expected())))
    }

    pub(super) fn integer(self) -> Result<u64, ConfigError> {
        let text = self.text();
        if !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(self.invalid());
        }
        text.parse().map_err(|_| self.out_of_range())
    }

    /// A size in MiB, in bytes.
    pub(super) fn mib(self) -> Result<u64, ConfigError> {
        self.integer()?.checked_mul(MIB).ok_or_else(|| self.too_many_mib())
    }

    fn too_many_mib(self) -> ConfigError {
        self.out_of_range_expecting(format!("at most {} MiB", u64::MAX / MIB))
    }

    /// A size in MiB that may be a decimal fraction, in bytes, of which it must be a whole number.
    pub(super) fn mib_of_bytes(self) -> Result<u64, ConfigError> {
        let Some((whole, fraction)) = self.text().split_once('.') else { return self.mib() };
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(whole) || !is_number(fraction) {
            return Err(self.invalid());
        }
        let whole =
            whole.parse().ok().and_then(|whole: u64| whole.checked_mul(MIB)).ok_or_else(|| self.too_many_mib())?;
        let whole_bytes = || "MiB with a fraction that is a whole number of bytes".to_owned();
        let rest = bytes_of_fraction(fraction).ok_or_else(|| self.out_of_range_expecting(whole_bytes()))?;
        // Less than a MiB on top of whole ones.
        Ok(whole + rest)
    }

    /// A finite number without sign inside the bounds.
    pub(super) fn fraction(self, low: Bound<f64>, high: Bound<f64>) -> Result<f64, ConfigError> {
        let value = decimal(self.text()).ok_or_else(|| self.invalid())?;
        if (low, high).contains_value(value) { Ok(value) } else { Err(self.out_of_range()) }
    }

    pub(super) fn choice<T: Copy>(self, all: &[T], name: impl Fn(T) -> &'static str) -> Result<T, ConfigError> {
        all.iter().copied().find(|choice| name(*choice) == self.text()).ok_or_else(|| self.invalid())
    }
}

/// The bytes in a MiB times the fraction with these decimals, if that is a whole number.
fn bytes_of_fraction(decimals: &str) -> Option<u64> {
    let decimals = decimals.trim_end_matches('0');
    // A byte has 20 decimals.
    let scale = 10_u128.checked_pow(u32::try_from(decimals.len()).ok().filter(|&len| len <= 20)?)?;
    let scaled = decimals.bytes().fold(0, |sum, digit| sum * 10 + u128::from(digit - b'0')) * u128::from(MIB);
    if scaled.is_multiple_of(scale) { u64::try_from(scaled / scale).ok() } else { None }
}

trait Bounds {
    fn contains_value(&self, value: f64) -> bool;
}

impl Bounds for (Bound<f64>, Bound<f64>) {
    fn contains_value(&self, value: f64) -> bool {
        std::ops::RangeBounds::contains(self, &value)
    }
}

/// A finite decimal number such as `0.5`, `.5`, `1` or `2e-3`.
pub(super) fn decimal(text: &str) -> Option<f64> {
    let starts_well = text.bytes().next().is_some_and(|byte| byte.is_ascii_digit() || byte == b'.');
    let only_numeric = text.bytes().all(|byte| byte.is_ascii_digit() || b".eE+-".contains(&byte));
    if !starts_well || !only_numeric {
        return None;
    }
    text.parse().ok().filter(|value: &f64| value.is_finite())
}

/// Checks `roundup_power2_divisions`: one number, or a list of numbers for intervals of sizes.
/// Returns whether any of them asks for rounding, as numbers above 1 do.
pub(super) fn divisions(pair: &Pair<'_>) -> Result<bool, ConfigError> {
    let entries = match &pair.value {
        Value::Word(word) => return Ok(power_of_two_or_zero(Reader::part(pair.key, *word))? > 1),
        Value::List(_, entries) => entries,
    };
    let mut asks = false;
    for entry in entries {
        asks |= power_of_two_or_zero(Reader::part(pair.key, entry.value))? > 1;
        let name = Reader::part(pair.key, entry.name);
        if name.text() != ">" && !name.integer().is_ok_and(u64::is_power_of_two) {
            let expected = "a power of two, a size in MiB, or `>` before the `:`";
            return Err(name.invalid_expecting(expected.to_owned()));
        }
    }
    Ok(asks)
}

fn power_of_two_or_zero(reader: Reader<'_>) -> Result<u64, ConfigError> {
    let value = reader.integer()?;
    if value == 0 || value.is_power_of_two() { Ok(value) } else { Err(reader.out_of_range()) }
}

/// Checks how much address space to reserve: a positive fraction, or a size in GiB with `G` after
/// it.
pub(super) fn reserve(reader: Reader<'_>) -> Result<(), ConfigError> {
    let number = reader.text().strip_suffix('G').unwrap_or(reader.text());
    match decimal(number) {
        Some(value) if value > 0.0 => Ok(()),
        Some(_) => Err(reader.out_of_range()),
        None => Err(reader.invalid()),
    }
}
