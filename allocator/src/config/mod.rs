//! The allocator's options: a [`Config`] in code, or an option string as PyTorch takes it.
//!
//! An option string is a list of `name:value` pairs with commas between them, such as
//! `limit_mb:4096,cross_stream:off`. Whitespace around names, values and punctuation is
//! ignored; everything else is taken literally, and what is not understood is an error that says
//! where it stands. If an option is given twice, the later one counts. The option strings of PyTorch work
//! unchanged.
//!
//! [`Config`] lists the options and their ranges.

use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;

use options::ROWS;

pub use error::{ConfigError, ConfigErrorKind};
#[doc(hidden)]
pub use options::OPTIONS;
pub use options::{Config, IgnoredOption};
pub(crate) use options::{GRANULE_MIN, listed};
pub use values::{Backing, CrossStream, MemoryFirst, SplitFrames, TagSource};

mod error;
mod options;
mod parse;
mod values;

#[cfg(test)]
mod tests;

impl Config {
    /// The configuration that an option string describes; what it does not name has its default.
    ///
    /// # Errors
    ///
    /// If the string is not of the form in the [module's documentation](self), names an unknown
    /// option, or gives a value that is out of range, alone or together with the other options. The
    /// error points at the spot.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        let mut config = Config::default();
        config.apply(text)?;
        Ok(config)
    }

    /// Sets the options that an option string names and leaves the others as they are.
    ///
    /// # Errors
    ///
    /// As [`Config::parse`]; the options are checked together with those that were set before.
    /// After an error `self` is unchanged.
    pub fn apply(&mut self, text: &str) -> Result<(), ConfigError> {
        let mut config = self.clone();
        parse::apply(&mut config, text)?;
        config.validate()?;
        *self = config;
        Ok(())
    }

    /// The configuration from the environment: the option string in `AQUIFER_ALLOC_CONF`, else that
    /// in `PYTORCH_ALLOC_CONF`, else that in `PYTORCH_CUDA_ALLOC_CONF`. The first that is set, even
    /// if empty, is the only one read. If none is set, this is the default.
    ///
    /// `PYTORCH_NO_CUDA_MEMORY_CACHING`, set to anything but nothing or `0`, turns
    /// [`Config::no_cache`] on, unless the option string says otherwise.
    ///
    /// # Errors
    ///
    /// As [`Config::parse`], or if the variable does not hold Unicode text. The error names the
    /// variable.
    pub fn from_env() -> Result<Config, ConfigError> {
        read(|name| std::env::var_os(name))
    }

    /// Checks that every field is in its range.
    ///
    /// # Errors
    ///
    /// The first that is not. There is no option string to point into.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let wrong = ROWS.iter().find(|row| !row.in_range(self));
        wrong.map_or(Ok(()), |row| Err(row.refusal(&(row.text)(self).unwrap_or_default())))
    }

    /// The options that were given, ask for something other than the default, and have no effect
    /// where memory comes as `backing` says; in the order of the documentation. See
    /// [`Allocator::backing`](crate::Allocator::backing) for what it comes as.
    ///
    /// ```
    /// use aquifer::memory::{Backing, Config};
    /// let config: Config = "max_split_size_mb:128,granule_mb:4".parse()?;
    /// let ignored = |backing| config.ignored(backing).into_iter().map(|option| option.key).collect::<Vec<_>>();
    /// assert_eq!(ignored(Backing::Paged), ["max_split_size_mb"]);
    /// assert_eq!(ignored(Backing::Segments), ["granule_mb", "max_split_size_mb"]);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn ignored(&self, backing: Backing) -> Vec<IgnoredOption> {
        let ignored = ROWS.iter().filter_map(|row| {
            let reason = row.without_effect(backing)?;
            Some(IgnoredOption { key: row.name(), value: (row.text)(self)?, reason })
        });
        ignored.collect()
    }

    /// The most bytes that may be held from a device with `total` bytes of memory, of which `free`
    /// are free or held: the smallest of the limits that are set, or `None` if none is. A share of
    /// `bytes / total` allows `bytes`; parts of a byte are cut off.
    pub fn limit_bytes(&self, total: u64, free: u64) -> Option<u64> {
        let of_total = (self.per_process_memory_fraction < 1.0).then(|| share(total, self.per_process_memory_fraction));
        let of_free = self.limit_free_fraction.map(|fraction| share(free, fraction));
        [self.limit, of_total, of_free].into_iter().flatten().min()
    }
}

/// The most bytes whose share of `total`, as a program computes it, is at most `fraction`: so the
/// fraction `bytes / total` stands for `bytes`, although it was rounded.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a fraction in [0, 1] of fewer than 2^53 bytes; the casts saturate"
)]
pub(crate) fn share(total: u64, fraction: f64) -> u64 {
    let cut_off = (total as f64 * fraction) as u64;
    let next = cut_off.saturating_add(1);
    if next as f64 / total as f64 <= fraction { next.min(total) } else { cut_off }
}

/// The options that differ from the default, in the order of the documentation: an option string
/// that gives this configuration again. Limit and headroom may be no whole MiB; they are then
/// printed with a fraction.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for row in ROWS {
            if let Some(value) = (row.text)(self) {
                write!(f, "{separator}{}:{value}", row.name())?;
                separator = ",";
            }
        }
        Ok(())
    }
}

/// Options as text where a configuration is wanted, such as `"limit_mb:4096"`.
impl TryFrom<&str> for Config {
    type Error = ConfigError;

    fn try_from(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text)
    }
}

impl FromStr for Config {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text)
    }
}

/// Variables that hold an option string; the first that is set counts.
const VARIABLES: [&str; 3] = ["AQUIFER_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];

/// The variable that turns caching off, regardless of the option string.
const NO_CACHING: &str = "PYTORCH_NO_CUDA_MEMORY_CACHING";

/// The configuration from the variables that `lookup` gives.
pub(super) fn read(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Config, ConfigError> {
    let no_cache = lookup(NO_CACHING).is_some_and(|value| !value.is_empty() && value != "0");
    let mut config = Config { no_cache, ..Config::default() };
    let Some((variable, value)) = VARIABLES.iter().find_map(|name| Some((*name, lookup(name)?))) else {
        return Ok(config);
    };
    let text = value.to_str().ok_or_else(|| ConfigError::new(ConfigErrorKind::NotUnicode).read_from(variable))?;
    config.apply(text).map_err(|error| error.read_from(variable))?;
    Ok(config)
}
