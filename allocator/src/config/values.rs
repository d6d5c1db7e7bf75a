//! Reading one value: numbers, sizes, fractions, choices, which are listed here, and the two kinds
//! of list.
//!
//! A value is taken as a whole or refused. Numbers are digits only: no sign, no hexadecimal,
//! nothing after them.

use std::fmt;
use std::path::PathBuf;

use super::error::{ConfigError, ConfigErrorKind, quoted};
use super::parse::{Value, Word};

/// Bytes in a MiB, the unit of every `_mb` option.
const MIB: u64 = 1 << 20;

/// The type of a field of a [`Config`](super::Config).
pub(super) trait Field: PartialEq + Sized {
    fn read(word: Word<'_>) -> Result<Self, ConfigError>;

    /// The text from which it is read.
    fn text(&self) -> String;
}

impl<T: Field> Field for Option<T> {
    fn read(word: Word<'_>) -> Result<Option<T>, ConfigError> {
        T::read(word).map(Some)
    }

    fn text(&self) -> String {
        self.as_ref().map(T::text).unwrap_or_default()
    }
}

impl Field for bool {
    fn read(word: Word<'_>) -> Result<bool, ConfigError> {
        let hint = match word.text() {
            "True" => return Ok(true),
            "False" => return Ok(false),
            "1" => "True",
            "0" => "False",
            text if ["true", "yes", "on"].iter().any(|word| text.eq_ignore_ascii_case(word)) => "True",
            text if ["false", "no", "off"].iter().any(|word| text.eq_ignore_ascii_case(word)) => "False",
            _ => return Err(word.invalid()),
        };
        Err(word.invalid_expecting(format!("{}; write `{hint}`", word.row.expected)))
    }

    fn text(&self) -> String {
        if *self { "True" } else { "False" }.to_owned()
    }
}

impl Field for u32 {
    fn read(word: Word<'_>) -> Result<u32, ConfigError> {
        u32::try_from(integer(word)?).map_err(|_| word.out_of_range())
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// Bytes, given in MiB: a whole number, or a decimal fraction with every digit.
impl Field for u64 {
    fn read(word: Word<'_>) -> Result<u64, ConfigError> {
        let Some((whole, fraction)) = word.text().split_once('.') else { return mib(word) };
        if !is_digits(whole) || !is_digits(fraction) {
            return Err(word.invalid());
        }
        let whole = whole.parse().ok().and_then(|whole: u64| whole.checked_mul(MIB)).ok_or_else(|| too_many(word))?;
        let rest = bytes_of_fraction(fraction).ok_or_else(|| {
            word.out_of_range_expecting("MiB with a fraction that is a whole number of bytes".to_owned())
        })?;
        // Less than a MiB on top of whole ones.
        Ok(whole + rest)
    }

    fn text(&self) -> String {
        let mut text = (self / MIB).to_string();
        let mut rest = self % MIB;
        if rest != 0 {
            text.push('.');
        }
        while rest != 0 {
            rest *= 10;
            text.push(char::from(b"0123456789"[(rest / MIB) as usize % 10]));
            rest %= MIB;
        }
        text
    }
}

impl Field for f64 {
    fn read(word: Word<'_>) -> Result<f64, ConfigError> {
        decimal(word.text()).ok_or_else(|| word.invalid())
    }

    fn text(&self) -> String {
        // A sum, because zero may have a sign, which option strings do not take.
        (self + 0.0).to_string()
    }
}

/// A file whose ending names a format of snapshots.
impl Field for PathBuf {
    fn read(word: Word<'_>) -> Result<PathBuf, ConfigError> {
        let path = PathBuf::from(word.text());
        let ends_in = |ending: &&str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending));
        if ["pickle", "pkl", "json"].iter().any(ends_in) { Ok(path) } else { Err(word.invalid()) }
    }

    fn text(&self) -> String {
        self.display().to_string()
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn integer(word: Word<'_>) -> Result<u64, ConfigError> {
    if !is_digits(word.text()) {
        return Err(word.invalid());
    }
    word.text().parse().map_err(|_| word.out_of_range())
}

/// A whole number of MiB, in bytes.
fn mib(word: Word<'_>) -> Result<u64, ConfigError> {
    integer(word)?.checked_mul(MIB).ok_or_else(|| too_many(word))
}

fn too_many(word: Word<'_>) -> ConfigError {
    word.out_of_range_expecting(format!("at most {} MiB", u64::MAX / MIB))
}

/// The bytes in a MiB times the fraction with these decimals, if that is a whole number.
fn bytes_of_fraction(decimals: &str) -> Option<u64> {
    let decimals = decimals.trim_end_matches('0');
    // A byte has 20 decimals.
    let scale = 10_u128.checked_pow(u32::try_from(decimals.len()).ok().filter(|&len| len <= 20)?)?;
    let scaled = decimals.bytes().fold(0, |sum, digit| sum * 10 + u128::from(digit - b'0')) * u128::from(MIB);
    if scaled.is_multiple_of(scale) { u64::try_from(scaled / scale).ok() } else { None }
}

/// A finite decimal number such as `0.5`, `.5`, `1` or `2e-3`.
fn decimal(text: &str) -> Option<f64> {
    let starts_well = text.bytes().next().is_some_and(|byte| byte.is_ascii_digit() || byte == b'.');
    let only_numeric = text.bytes().all(|byte| byte.is_ascii_digit() || b".eE+-".contains(&byte));
    if !starts_well || !only_numeric {
        return None;
    }
    text.parse().ok().filter(|value: &f64| value.is_finite())
}

// The functions below check the values of inert options, and return whether a value asks for
// something other than the default.

pub(super) fn flag(value: &Value<'_>) -> Result<bool, ConfigError> {
    bool::read(value.word()?)
}

/// A number that `holds`, and is not the default.
pub(super) fn number(
    value: &Value<'_>,
    default: Option<u64>,
    holds: impl Fn(u64) -> bool,
) -> Result<bool, ConfigError> {
    let word = value.word()?;
    let number = integer(word)?;
    if holds(number) { Ok(default != Some(number)) } else { Err(word.out_of_range()) }
}

/// At least so many MiB, and not the default.
pub(super) fn mib_from(value: &Value<'_>, least: u64, default: Option<u64>) -> Result<bool, ConfigError> {
    mib(value.word()?)?;
    number(value, default, |mib| mib >= least)
}

/// A fraction between 0 and 1, neither of which is one.
pub(super) fn open_fraction(value: &Value<'_>) -> Result<bool, ConfigError> {
    let word = value.word()?;
    let fraction = f64::read(word)?;
    if fraction > 0.0 && fraction < 1.0 { Ok(true) } else { Err(word.out_of_range()) }
}

pub(super) fn backend(value: &Value<'_>) -> Result<bool, ConfigError> {
    let word = value.word()?;
    match word.text() {
        "native" => Ok(false),
        "cudaMallocAsync" => Err(word.fail(ConfigErrorKind::Unavailable {
            key: word.row.name(),
            value: quoted(word.text()),
            instead: "the driver's own pool is not used; leave `backend` out, or use `no_cache:True` to cache nothing here",
        })),
        _ => Err(word.invalid()),
    }
}

/// One number of divisions, or a list of numbers for intervals of sizes. Numbers above 1 ask for
/// rounding.
pub(super) fn divisions(value: &Value<'_>) -> Result<bool, ConfigError> {
    let of = |word: Word<'_>| match integer(word)? {
        number if number == 0 || number.is_power_of_two() => Ok(number > 1),
        _ => Err(word.out_of_range()),
    };
    let Value::List(_, entries) = value else { return of(value.word()?) };
    let mut asks = false;
    for (size, number) in entries {
        asks |= of(*number)?;
        if size.text() != ">" && !integer(*size).is_ok_and(u64::is_power_of_two) {
            let expected = "a power of two, a size in MiB, or `>` before the `:`";
            return Err(size.invalid_expecting(expected.to_owned()));
        }
    }
    Ok(asks)
}

/// How much address space to reserve.
pub(super) fn reserve(value: &Value<'_>) -> Result<bool, ConfigError> {
    reserved(value.word()?)
}

/// The same for each of several classes.
pub(super) fn reserve_by_class(value: &Value<'_>) -> Result<bool, ConfigError> {
    let Value::List(_, entries) = value else { return Err(value.whole().invalid()) };
    entries.iter().try_fold(true, |_, (_, word)| reserved(*word))
}

/// A positive fraction, or a size in GiB with `G` after it.
fn reserved(word: Word<'_>) -> Result<bool, ConfigError> {
    match decimal(word.text().strip_suffix('G').unwrap_or(word.text())) {
        Some(value) if value > 0.0 => Ok(true),
        Some(_) => Err(word.out_of_range()),
        None => Err(word.invalid()),
    }
}

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// Every choice, in the order of the documentation.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// The word for it in an option string.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $word,)* }
            }
        }

        impl Field for $name {
            fn read(word: Word<'_>) -> Result<$name, ConfigError> {
                Self::ALL.iter().copied().find(|choice| choice.name() == word.text()).ok_or_else(|| word.invalid())
            }

            fn text(&self) -> String {
                self.name().to_owned()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

choice! {
    /// Where an allocator's memory comes from: option `backing`.
    Backing {
        /// Physical granules, which are mapped wherever contiguous memory is needed. Where the
        /// device cannot map memory, this falls back to [`Backing::Segments`];
        /// [`crate::Allocator::backing`] tells which is in use.
        #[default]
        Paged = "paged",
        /// Large plain driver allocations, cached and split into blocks.
        Segments = "segments",
    }
}

choice! {
    /// Whether a stream may take blocks that were last freed on another stream: option
    /// `cross_stream`.
    CrossStream {
        /// Never, as in PyTorch: each stream reuses only its own blocks.
        Off = "off",
        /// A stream may take blocks whose last use is known to be done, or is already ordered
        /// before the stream; no wait is inserted.
        #[default]
        Ready = "ready",
        /// A stream may also take blocks for which it has to wait for the other stream; such waits
        /// are inserted and counted.
        Wait = "wait",
    }
}

choice! {
    /// Whether frames that are partly in use are split before a request is refused for lack of
    /// memory: option `split_frames`, for mapped memory. A frame is physical memory of several
    /// granules with one driver handle.
    ///
    /// Splitting moves live granules to memory of their own, at the same addresses. It waits for
    /// the device, and until it ends nothing may be enqueued that uses them. Access guards of other
    /// threads wait for that; nothing is split while there is one, or a reservation.
    SplitFrames {
        /// Never.
        #[default]
        Off = "off",
        /// Where a request would be refused otherwise. This is a promise: while a request is being
        /// served, no other thread enqueues work on addresses of this allocator without an access
        /// guard, and none of another device that was enqueued before is still running. Memory that
        /// a network card or another process knows by its address is pinned
        /// ([`Allocator::pin_mapping`](crate::Allocator::pin_mapping)).
        On = "on",
    }
}

choice! {
    /// Where the names of allocations in statistics and reports come from: option `tags`.
    TagSource {
        /// Allocations have no names.
        Off = "off",
        /// The scopes that the program opens: [`crate::TagScope`].
        #[default]
        Scope = "scope",
        /// The `tracing` span that is entered when the allocation is made.
        Span = "span",
    }
}
