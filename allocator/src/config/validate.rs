//! The rules that a finished [`Config`] must keep, however it came about.

use super::Config;
use super::display::mib;
use super::error::{ConfigError, ConfigErrorKind};
use super::keys::Key;
use super::parse::Pair;

/// The smallest granule: no device maps less.
pub(crate) const GRANULE_MIN: u64 = 2 << 20;

/// A rule that does not hold: which option is at fault, and what to say.
#[derive(Debug)]
pub(super) struct Violation {
    key: Key,
    pub(super) kind: ConfigErrorKind,
}

impl Violation {
    fn range(key: Key, value: impl ToString) -> Violation {
        let kind = ConfigErrorKind::OutOfRange {
            key: key.name(),
            value: value.to_string(),
            expected: key.expected().to_owned(),
        };
        Violation { key, kind }
    }

    fn size(key: Key, bytes: u64) -> Violation {
        Violation::range(key, format!("{} MiB", mib(bytes)))
    }

    /// The error, pointing at the last place in the option string that set the option at fault.
    pub(super) fn locate(self, text: &str, pairs: &[Pair<'_>]) -> ConfigError {
        match pairs.iter().rev().find(|pair| pair.key == self.key) {
            Some(pair) => ConfigError::at(text, pair.value.whole().span, self.kind),
            None => ConfigError::new(self.kind),
        }
    }
}

impl Config {
    pub(super) fn check(&self) -> Result<(), Violation> {
        let powers = [(Key::Granule, self.granule), (Key::Frame, self.frame)];
        for (key, bytes) in powers.into_iter().filter_map(|(key, bytes)| Some((key, bytes?))) {
            if !bytes.is_power_of_two() || bytes < GRANULE_MIN {
                return Err(Violation::size(key, bytes));
            }
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
}
