//! All options, a row each, from which parsing, checks, canonical texts, messages and the
//! documentation follow.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use super::error::{ConfigError, ConfigErrorKind, quoted};
use super::values::{Backing, CrossStream, Field, MemoryFirst, SplitFrames, TagSource};

/// An option.
#[derive(Debug)]
pub(super) struct Row {
    /// Every accepted spelling, the canonical one first.
    names: &'static [&'static str],
    /// What the value may be, as messages say it.
    expected: &'static str,
    /// Takes the value, which [`Row::in_range`] then checks. Returns false if it is none.
    pub(super) set: fn(&mut Config, &str) -> bool,
    /// The value in an option string; `None` if it has its default.
    pub(super) text: fn(&Config) -> Option<String>,
    /// What must hold of the value.
    range: &'static [fn(&Config) -> bool],
    /// Why the option has no effect with these backings.
    in_vain: &'static [(&'static str, &'static [Backing])],
}

impl Row {
    pub(super) fn find(name: &str) -> Option<&'static Row> {
        ROWS.iter().find(|row| row.names.contains(&name))
    }

    /// The canonical spelling.
    pub(super) fn name(&self) -> &'static str {
        self.names[0]
    }

    pub(super) fn in_range(&self, config: &Config) -> bool {
        self.range.iter().all(|holds| holds(config))
    }

    /// Why the option has no effect on memory that comes as `backing` says; `None` if it has one.
    pub(super) fn without_effect(&self, backing: Backing) -> Option<&'static str> {
        self.in_vain.iter().find(|(_, backings)| backings.contains(&backing)).map(|(why, _)| *why)
    }

    /// The error for a value that the option does not take.
    pub(super) fn refusal(&self, value: &str) -> ConfigError {
        let (key, value, expected) = (self.name(), quoted(value), self.expected);
        ConfigError::new(ConfigErrorKind::InvalidValue { key, value, expected })
    }
}

/// The inert options that were given and ask for something, with their values.
type Inert = BTreeMap<&'static str, String>;

/// Declares `ROWS`, and `table`, a macro for the documentation.
///
/// A row is: names `=>` the field of [`Config`], its range, what the value may be, the default, the
/// effect, and whether it has one on mapped memory only. Inert options, by why they have no effect,
/// have in place of all that the values that ask for nothing.
macro_rules! options {
    (
        $($name:literal $(| $alias:literal)* => $field:ident $(if $in_range:expr)?,
            $expected:literal, $default:literal, $effect:literal $(, $only:ident)?;)*
        $(inert $reason:literal { $($inert:literal $(| $inert_alias:literal)* $(= $nothing:literal)*;)* })*
    ) => {
        /// All options in the order of the documentation, which is that of canonical option
        /// strings.
        pub(super) static ROWS: &[Row] = &[
            $(Row {
                names: &[$name, $($alias),*],
                expected: $expected,
                set: |config, text| Field::read(text).map(|value| config.$field = value).is_some(),
                text: |config| (config.$field != Config::default().$field).then(|| Field::text(&config.$field)),
                range: &[$($in_range)?],
                in_vain: &[$($only)?],
            },)*
            $($(Row {
                names: &[$inert, $($inert_alias),*],
                expected: "any text",
                set: |config, text| {
                    config.inert.remove($inert);
                    if ![$($nothing),*].contains(&text) {
                        config.inert.insert($inert, text.split_whitespace().collect());
                    }
                    true
                },
                text: |config| config.inert.get($inert).cloned(),
                range: &[],
                in_vain: &[($reason, Backing::ALL)],
            },)*)*
        ];

        macro_rules! table {
            () => { concat!(
"All `_mb` options are whole MiB (1048576 bytes), but for `limit_mb`, `headroom_mb`, `reserve_mb` and `quarantine_mb`,
which may have a fraction (`1.5`) that is whole bytes. *Inert* options have no effect here, whatever their value. Some
others have one on mapped memory only. [`Config::ignored`] lists those that were given in vain.

| option | value | default | effect |
| --- | --- | --- | --- |
",
                $("| `", $name, "`", $(", `", $alias, "`",)* " | ", $expected, " | ", $default, " | ", $effect, " |\n",)*
                $($("| `", $inert, "`", $(", `", $inert_alias, "`",)* " | any |  | inert: ", $reason, " |\n",)*)*
"
Some malformed options that PyTorch accepts are errors here: numbers with text behind them (PyTorch reads `12abc`
as 12), negative numbers (which it wraps), sizes of 2^64 bytes and more (which it cuts off), missing colons (after
which it misassigns words), and commas at the end (which it skips).
",
            ) };
        }
    };
}

const MAPPED_ONLY: (&str, &[Backing]) =
    ("for mapped memory only, and this memory comes in segments", &[Backing::Segments]);

/// The smallest granule: no device maps less.
pub(crate) const GRANULE_MIN: u64 = 2 << 20;

fn is_granule(bytes: u64) -> bool {
    bytes.is_power_of_two() && bytes >= GRANULE_MIN
}

options! {
    "per_process_memory_fraction" => per_process_memory_fraction
        if |config| (0.0..=1.0).contains(&config.per_process_memory_fraction),
        "a fraction in [0, 1]", "1 = no limit", "limit, as a share of the device's memory";
    "throw_on_cudamalloc_oom" => fail_fast, "`True` or `False`", "`False`",
        "a request that the limit does not allow is refused at once: [`Config::fail_fast`]";
    "backing" => backing, "`paged` or `segments`", "`paged`", "where memory comes from: [`Backing`]";
    "granule_mb" => granule if |config| config.granule.is_none_or(is_granule),
        "a power of two of MiB, from 2 to 8796093022208", "2, more above 512 GiB",
        "mapped memory only: [`Config::granule`]", MAPPED_ONLY;
    "frame_mb" => frame if |config| config.frame.is_none_or(is_granule),
        "a power of two of MiB, from 2 to 8796093022208", "up to 256",
        "mapped memory only: [`Config::frame`]", MAPPED_ONLY;
    "memory_first" => memory_first, "`off` or `on`", "`off`", "mapped memory only: [`MemoryFirst`]", MAPPED_ONLY;
    "split_frames" => split_frames, "`off` or `on`", "`off`", "mapped memory only: [`SplitFrames`]", MAPPED_ONLY;
    "cross_stream" => cross_stream, "`off`, `ready` or `wait`", "`ready`",
        "reuse between streams: [`CrossStream`]; PyTorch's is `off`";
    "limit_mb" => limit if |config| config.limit != Some(0),
        "MiB greater than 0, such as 512 or 0.5; leave the option out for no limit", "none", "limit in bytes";
    "limit_free_fraction" => limit_free_fraction
        if |config| config.limit_free_fraction.is_none_or(|fraction| fraction > 0.0 && fraction <= 1.0),
        "a fraction in (0, 1], 0 excluded", "none", "limit, as a share of what is free on the device or held from it, asked whenever more is taken";
    "headroom_mb" => headroom, "MiB, such as 512 or 0.5", "0, a sixteenth of memory shared with the host",
        "left free on the device for libraries, or for the host: [`Config::headroom`]";
    "reserve_mb" => reserve, "MiB, such as 512 or 0.5", "0", "mapped memory only: taken when the allocator opens, and \
        kept: [`Config::reserve`]";
    "history" => history, "a whole number of entries, at most 4294967295", "0 = off",
        "length of the ring of trace entries";
    "oom_snapshot" => oom_snapshot, "a path that ends in .pickle, .pkl or .json, without `,[]`", "none",
        "the first refused request saves a snapshot: [`Config::oom_snapshot`]";
    "tags" => tags, "`off`, `scope` or `span`", "`scope`", "where names of allocations come from: [`TagSource`]";
    "no_cache" => no_cache, "`True` or `False`", "`False`", "every allocation goes straight to the driver, and what \
        was dropped goes back at the next one; private pools keep theirs";
    "quarantine_mb" => quarantine, "MiB, such as 64 or 0.5", "64 on a device that checks programs, else 0",
        "freed memory that serves no request while there is other: [`Config::quarantine`]";

    inert "the driver's pool is never used" {
        "backend" = "native";
    }
    inert "no lock is ever held during a driver call" {
        "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" = "True" = "False";
    }
    inert "the sizes of blocks and segments follow fixed rules" {
        "large_segment_size_mb" = "20";
        "max_split_size_mb";
        "max_non_split_rounding_mb";
        "roundup_power2_divisions" = "0" = "1";
    }
    inert "unused memory goes back when a request needs it, whatever its age" {
        "garbage_collection_threshold";
    }
    inert "`backing:paged` does what it asks for" {
        "expandable_segments" = "False";
    }
    inert "addresses are reserved as they are needed" {
        "expandable_segments_reserve";
        "expandable_segments_reserve_by_class";
    }
    inert "blocks used by several streams are not reused inside a graph capture" {
        "graph_capture_record_stream_reuse" = "False";
    }
    inert "pinned host memory has a pool of its own, which has options of its own" {
        "pinned_use_background_threads" = "False";
        "pinned_max_round_threshold_mb";
        "pinned_max_cached_size_mb";
        "pinned_use_cuda_host_register" | "pinned_use_hip_host_register" = "False";
        "pinned_num_register_threads" = "1";
        "pinned_reserve_segment_size_mb";
        "pinned_free_catch_all" = "False";
    }
}

/// The options in words, as the documentation of [`Config`] has them.
#[doc(hidden)]
pub const OPTIONS: &str = table!();

/// The configuration of an [`Allocator`](crate::Allocator).
///
/// It is parsed from an option string, taken from the environment ([`Config::from_env`]), or set
/// field by field in code. The allocator checks it with [`Config::validate`].
///
/// ```
/// use aquifer::memory::{Config, CrossStream};
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
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// # Options
///
#[doc = table!()]
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
    /// granule or several. `None`, the default, is 32 to 64 MiB, more for large blocks while much is
    /// left, and less for small pools. Either way frames are granules while memory is scarce. As
    /// large as a granule, every frame is one. Option `frame_mb`.
    pub frame: Option<u64>,
    /// Whether mapped memory saves memory rather than driver time. Option `memory_first`.
    pub memory_first: MemoryFirst,
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
    /// Bytes that are left free on the device for libraries that allocate by themselves. `None`, the
    /// default, is 0 on a device with memory of its own. Where it shares the host's, it is a
    /// sixteenth: running out there ends processes, and the host's programs take memory between two
    /// looks. [`Allocator::headroom`](crate::Allocator::headroom) tells. Option `headroom_mb`.
    pub headroom: Option<u64>,
    /// Bytes of mapped memory, in whole granules, that the allocator takes when it opens, which fails
    /// without them, and gives back when it closes: neither
    /// [`Allocator::empty_cache`](crate::Allocator::empty_cache) nor sleep returns them. They serve
    /// all requests but those for exportable memory. A frame that has the wrong size for a request
    /// goes back and others are made of its memory, which another program may take meanwhile.
    /// Default 0. Option `reserve_mb`.
    pub reserve: u64,
    /// How many trace entries are kept, the oldest giving way; 0, the default, is off. Option
    /// `history`.
    pub history: u32,
    /// A file to which a snapshot of the memory is saved when a request is first refused for lack
    /// of memory; `None`, the default, is off. Its ending names the format, as for
    /// [`Snapshot::save`](crate::Snapshot::save). The file names of devices other than the first
    /// have their ordinal before the ending. The snapshot has the refused request, and with `history`
    /// the time before; [`OomReport::snapshot`](crate::OomReport::snapshot) says whether it was saved.
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
    pub(crate) inert: Inert,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            per_process_memory_fraction: 1.0,
            fail_fast: false,
            backing: Backing::default(),
            granule: None,
            frame: None,
            memory_first: MemoryFirst::default(),
            split_frames: SplitFrames::default(),
            cross_stream: CrossStream::default(),
            limit: None,
            limit_free_fraction: None,
            headroom: None,
            reserve: 0,
            history: 0,
            oom_snapshot: None,
            tags: TagSource::default(),
            no_cache: false,
            quarantine: None,
            inert: Inert::default(),
        }
    }
}

/// The known spelling that differs from `name` in few characters, or else begins with it.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    const FARTHEST: usize = 5;
    let known = || ROWS.iter().flat_map(|row| row.names).copied();
    let candidates = known().filter(|known| known.len().abs_diff(name.len()) <= FARTHEST);
    let closest = candidates.map(|known| (edit_distance(name, known), known)).min();
    let near = closest.filter(|&(distance, _)| distance <= FARTHEST && distance * 2 < name.len());
    near.map(|(_, known)| known).or_else(|| known().find(|known| name.len() >= 4 && known.starts_with(name)))
}

/// Insertions, deletions and substitutions that turn one text into the other, ignoring ASCII case.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(!from.eq_ignore_ascii_case(&to));
            let least = substituted.min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], least);
        }
    }
    row[b.len()]
}

/// An option that was given and has no effect: [`Config::ignored`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IgnoredOption {
    /// Its name, in the canonical spelling.
    pub key: &'static str,
    /// Its value, without whitespace.
    pub value: String,
    /// Why it has no effect.
    pub reason: &'static str,
}

impl fmt::Display for IgnoredOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} ({})", self.key, self.value, self.reason)
    }
}

/// Several of them, each reason once.
pub(crate) fn listed(ignored: &[IgnoredOption]) -> String {
    let reasons = ignored.chunk_by(|one, other| one.reason == other.reason).filter_map(|options| {
        let names: Vec<String> = options.iter().map(|option| format!("{}:{}", option.key, option.value)).collect();
        Some(format!("{} ({})", names.join(", "), options.first()?.reason))
    });
    reasons.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_its_own_and_nearest_to_itself() {
        for row in ROWS {
            for name in row.names {
                assert_eq!(Row::find(name).map(Row::name), Some(row.name()));
                assert_eq!(nearest(name), Some(*name));
            }
        }
    }

    #[test]
    fn misspellings_find_what_was_meant() {
        assert_eq!(nearest("max_split_mb"), Some("max_split_size_mb"));
        assert_eq!(nearest("MAX_SPLIT_SIZE_MB"), Some("max_split_size_mb"));
        assert_eq!(nearest("expandable_segment"), Some("expandable_segments"));
        assert_eq!(nearest("garbage_collect_threshold"), Some("garbage_collection_threshold"));
        assert_eq!(nearest("max_split_size"), Some("max_split_size_mb"));
        assert_eq!(nearest("limit"), Some("limit_mb"));
        assert_eq!(nearest("expandable"), Some("expandable_segments"));
        assert_eq!(nearest("lim"), None);
        assert_eq!(nearest("foo"), None);
        assert_eq!(nearest(""), None);
        assert_eq!(nearest(&"x".repeat(100_000)), None);
    }

    #[test]
    fn distances() {
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("abc", ""), 3);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("flaw", "lawn"), 2);
    }
}
