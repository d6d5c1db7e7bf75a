//! The rules that a finished [`Config`] must keep, however it came about.

use super::Config;
use super::display::mib;
use super::error::{ConfigError, ConfigErrorKind};
use super::keys::Key;
use super::parse::Pair;
use super::values::MIB;
use crate::size_class::MIN_LARGE_ALLOC;

/// The smallest granule: no device maps less.
pub(crate) const GRANULE_MIN: u64 = 2 << 20;
/// The largest segment that may be asked for, 1 TiB: no device has more, so that no request would
/// be served.
const LARGE_SEGMENT_MAX: u64 = 1 << 40;

/// A rule that does not hold: which option is at fault, which other one the rule compares it with,
/// and what to say.
#[derive(Debug)]
pub(super) struct Violation {
    key: Key,
    other: Option<Key>,
    pub(super) kind: ConfigErrorKind,
}

impl Violation {
    fn range(key: Key, value: impl ToString) -> Violation {
        let kind = ConfigErrorKind::OutOfRange {
            key: key.name(),
            value: value.to_string(),
            expected: key.expected().to_owned(),
        };
        Violation { key, other: None, kind }
    }

    fn size(key: Key, bytes: u64) -> Violation {
        Violation::range(key, format!("{} MiB", mib(bytes)))
    }

    /// `key` must be at least `large_segment_size_mb`.
    fn below_large_segment(key: Key, bytes: u64, large_segment: u64) -> Violation {
        let other = Key::LargeSegmentSize;
        let kind = ConfigErrorKind::Conflict {
            key: key.name(),
            value: format!("{} MiB", mib(bytes)),
            other: other.name(),
            other_value: format!("{} MiB", mib(large_segment)),
        };
        Violation { key, other: Some(other), kind }
    }

    /// The error, pointing at the last place in the option string that set the option at fault, or
    /// else the other one.
    pub(super) fn locate(self, text: &str, pairs: &[Pair<'_>]) -> ConfigError {
        let place = |key: Key| pairs.iter().rev().find(|pair| pair.key == key);
        match place(self.key).or_else(|| place(self.other?)) {
            Some(pair) => ConfigError::at(text, pair.value.whole().span, self.kind),
            None => ConfigError::new(self.kind),
        }
    }
}

impl Config {
    pub(super) fn check(&self) -> Result<(), Violation> {
        self.check_sizes()?;
        if let Some(bad) = self.roundup_power2_divisions.iter().find(|n| **n != 0 && !n.is_power_of_two()) {
            return Err(Violation::range(Key::RoundupPower2Divisions, bad));
        }
        // Written so that a value that is not a number breaks the rule.
        if !(0.0..=1.0).contains(&self.per_process_memory_fraction) {
            return Err(Violation::range(Key::PerProcessMemoryFraction, self.per_process_memory_fraction));
        }
        if self.limit == Some(0) {
            return Err(Violation::range(Key::Limit, 0));
        }
        if let Some(fraction) = self.limit_free_fraction.filter(|f| !(*f > 0.0 && *f <= 1.0)) {
            return Err(Violation::range(Key::LimitFreeFraction, fraction));
        }
        Ok(())
    }

    /// Sizes of what is taken from the device are whole MiB in code, too: addresses and sizes of
    /// blocks follow from them.
    fn check_sizes(&self) -> Result<(), Violation> {
        let large_segment = self.large_segment_size;
        if large_segment <= MIN_LARGE_ALLOC || large_segment > LARGE_SEGMENT_MAX || !large_segment.is_multiple_of(MIB) {
            return Err(Violation::size(Key::LargeSegmentSize, large_segment));
        }
        let floors =
            [(Key::MaxSplitSize, self.max_split_size), (Key::MaxNonSplitRounding, self.max_non_split_rounding)];
        for (key, bytes) in floors.into_iter().filter_map(|(key, bytes)| Some((key, bytes?))) {
            if bytes < large_segment {
                return Err(Violation::below_large_segment(key, bytes, large_segment));
            }
            if !bytes.is_multiple_of(MIB) {
                return Err(Violation::size(key, bytes));
            }
        }
        let powers = [(Key::Granule, self.granule), (Key::Frame, self.frame)];
        for (key, bytes) in powers.into_iter().filter_map(|(key, bytes)| Some((key, bytes?))) {
            if !bytes.is_power_of_two() || bytes < GRANULE_MIN {
                return Err(Violation::size(key, bytes));
            }
        }
        Ok(())
    }
}
