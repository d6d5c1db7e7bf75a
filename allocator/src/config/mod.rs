//! The allocator's options: a [`Config`] in code, or an option string as PyTorch takes it.
//!
//! An option string is a list of `name:value` pairs with commas between them, such as
//! `limit_mb:4096,cross_stream:off`. Whitespace around names, values and punctuation is
//! ignored; everything else is taken literally, and what is not understood is an error that points
//! at it. If an option is given twice, the later one counts. The option strings of PyTorch work
//! unchanged.
//!
//! [`Config`] lists the options and their ranges.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use options::ROWS;

pub use error::{ConfigError, ConfigErrorKind};
pub use options::IgnoredOption;
pub(crate) use options::{GRANULE_MIN, listed};
pub use values::{Backing, CrossStream, SplitFrames, TagSource};

mod error;
mod options;
mod parse;
mod values;

#[cfg(test)]
mod tests;

/// The options in words, as the documentation of [`Config`] has them.
#[doc(hidden)]
pub const OPTIONS: &str = options::table!();

/// The configuration of an [`Allocator`](crate::Allocator).
///
/// It is parsed from an option string, taken from the environment ([`Config::from_env`]), or set
/// field by field in code. The allocator checks it with [`Config::validate`].
///
/// ```
/// use aquifer_allocator::config::{Config, CrossStream};
///
/// # fn main() -> Result<(), aquifer_allocator::config::ConfigError> {
/// let mut config: Config = "limit_mb:4096, split_frames:on".parse()?;
/// assert_eq!(config.limit, Some(4096 << 20));
///
/// config.apply("cross_stream:off")?;
/// config.history = 10_000;
/// config.validate()?;
/// assert_eq!(config.cross_stream, CrossStream::Off);
/// assert_eq!(config.to_string(), "split_frames:on,cross_stream:off,limit_mb:4096,history:10000");
///
/// let error = Config::parse("limits_mb:128").unwrap_err();
/// assert_eq!(error.offset(), Some(0));
/// println!("{error}"); // … did you mean `limit_mb`?
/// # Ok(())
/// # }
/// ```
///
/// # Options
///
#[doc = options::table!()]
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Limit on the bytes held from the device, as a share of all its memory, in [0, 1]; 1, the
    /// default, is no limit. Option `per_process_memory_fraction`.
    pub per_process_memory_fraction: f64,
    /// Whether a request that the limit does not allow is refused at once, without releasing cached
    /// memory and trying again. Default `false`. Option `throw_on_cudamalloc_oom`.
    pub fail_fast: bool,
    /// Where memory comes from. Option `backing`.
    pub backing: Backing,
    /// Size in bytes of a granule, the unit in which physical memory is mapped with
    /// [`Backing::Paged`]: a power of two, at least 2 MiB. `None`, the default, is 2 MiB on devices
    /// of up to 512 GiB, and more on larger ones, so that the memory of a device is at most 2^18
    /// granules. Larger granules take fewer driver calls and waste more memory. Option
    /// `granule_mb`.
    pub granule: Option<u64>,
    /// Size in bytes of the largest frames, the pieces in which physical memory is taken from the
    /// device and mapped with [`Backing::Paged`]: a power of two, at least 2 MiB. A frame is one
    /// granule or several. `None`, the default, is 16 MiB, but less for small blocks and for
    /// programs that use less than 4 GiB. Either way frames are granules while memory is scarce. As
    /// large as a granule, every frame is one. Option `frame_mb`.
    pub frame: Option<u64>,
    /// Whether frames that are partly in use are split before a request is refused. Option
    /// `split_frames`.
    pub split_frames: SplitFrames,
    /// Reuse of blocks between streams. Option `cross_stream`.
    pub cross_stream: CrossStream,
    /// Limit on the bytes held from the device, more than 0; `None`, the default, is no limit.
    /// Option `limit_mb`.
    pub limit: Option<u64>,
    /// Limit on the bytes held from the device, as a share of them and of what is free there
    /// whenever more are taken, in (0, 1]; `None`, the default, is no limit.
    /// [`Allocator::set_limit`](crate::Allocator::set_limit) replaces it. Option
    /// `limit_free_fraction`.
    pub limit_free_fraction: Option<f64>,
    /// Bytes that are left free on the device for libraries that allocate by themselves. Default 0.
    /// Option `headroom_mb`.
    pub headroom: u64,
    /// How many trace entries are kept, the oldest giving way; 0, the default, is off. Option
    /// `history`.
    pub history: u32,
    /// A file to which a snapshot of the memory is saved when a request is first refused for lack
    /// of memory; `None`, the default, is off. Its ending names the format, as for
    /// [`Snapshot::save`](crate::Snapshot::save). The file names of devices other than the first
    /// have their ordinal before the ending. With `history`, the snapshot has the time before.
    /// Option `oom_snapshot`.
    pub oom_snapshot: Option<PathBuf>,
    /// Where names of allocations come from. Option `tags`.
    pub tags: TagSource,
    /// Whether every allocation goes straight to the driver. Dropping one makes no driver call: its
    /// memory goes back when the allocator next allocates, or with `empty_cache`. Private pools
    /// keep their memory. Default `false`. Option `no_cache`.
    pub no_cache: bool,
    /// The most bytes of freed blocks in quarantine: blocks that serve no request while there is
    /// other memory for it, so that work which uses them after they were freed is found. Memory in
    /// quarantine counts as free, and none is bought or kept from the device because of it. `None`,
    /// the default, is 64 MiB on a device with a [`Witness`](aquifer_device::Witness) that watches
    /// blocks, and 0, which is off, on others. Option `quarantine_mb`.
    pub quarantine: Option<u64>,
    /// The inert options that were given and would change something if they were not inert, with
    /// their values.
    pub(crate) inert: options::Inert,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            per_process_memory_fraction: 1.0,
            fail_fast: false,
            backing: Backing::default(),
            granule: None,
            frame: None,
            split_frames: SplitFrames::default(),
            cross_stream: CrossStream::default(),
            limit: None,
            limit_free_fraction: None,
            headroom: 0,
            history: 0,
            oom_snapshot: None,
            tags: TagSource::default(),
            no_cache: false,
            quarantine: None,
            inert: options::Inert::default(),
        }
    }
}

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
        for value in parse::parse(text)? {
            let word = value.whole();
            (word.row.set)(&mut config, &value)?;
            if !word.row.in_range(&config) {
                return Err(word.out_of_range());
            }
        }
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
        let Some(row) = ROWS.iter().find(|row| !row.in_range(self)) else { return Ok(()) };
        Err(ConfigError::new(ConfigErrorKind::OutOfRange {
            key: row.name(),
            value: (row.text)(self).unwrap_or_default(),
            expected: row.expected.to_owned(),
        }))
    }

    /// The options that were given, ask for something other than the default, and have no effect
    /// where memory comes as `backing` says; in the order of the documentation. See
    /// [`Allocator::backing`](crate::Allocator::backing) for what it comes as.
    ///
    /// ```
    /// use aquifer_allocator::config::{Backing, Config};
    /// let config: Config = "max_split_size_mb:128,granule_mb:4".parse()?;
    /// let ignored = |backing| config.ignored(backing).into_iter().map(|option| option.key).collect::<Vec<_>>();
    /// assert_eq!(ignored(Backing::Paged), ["max_split_size_mb"]);
    /// assert_eq!(ignored(Backing::Segments), ["granule_mb", "max_split_size_mb"]);
    /// # Ok::<(), aquifer_allocator::config::ConfigError>(())
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
