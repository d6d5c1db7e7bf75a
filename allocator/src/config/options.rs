//! All options, a row each, from which parsing, checks, canonical texts, messages and the
//! documentation follow.

use std::collections::BTreeMap;
use std::fmt;

use super::error::ConfigError;
use super::parse::Value;
use super::values::{Field, backend, divisions, flag, mib_from, number, open_fraction, reserve, reserve_by_class};
use super::{Backing, Config};

/// An option.
#[derive(Debug)]
pub(super) struct Row {
    /// Every accepted spelling, the canonical one first.
    names: &'static [&'static str],
    /// What the value may be, as messages say it.
    pub(super) expected: &'static str,
    /// Takes the value, which [`Row::in_range`] then checks.
    pub(super) set: fn(&mut Config, &Value<'_>) -> Result<(), ConfigError>,
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
}

/// The inert options that were given and ask for something, with their values.
pub(crate) type Inert = BTreeMap<&'static str, String>;

/// Declares `ROWS`, and `table`, a macro for the documentation.
///
/// A row is: names `=>` the field of [`Config`], its range, what the value may be, the default, the
/// effect, and whether it has one on mapped memory only. Inert options, by why they have no effect,
/// have in place of the field a function that checks the value and returns whether it asks for
/// something other than the default.
macro_rules! options {
    (
        $($name:literal $(| $alias:literal)* => $field:ident $(if $in_range:expr)?,
            $expected:literal, $default:literal, $effect:literal $(, $only:ident)?;)*
        $(inert $reason:literal {
            $($inert:literal $(| $inert_alias:literal)* => $asks:expr, $inert_expected:literal, $inert_default:literal;)*
        })*
    ) => {
        /// All options in the order of the documentation, which is that of canonical option
        /// strings.
        pub(super) static ROWS: &[Row] = &[
            $(Row {
                names: &[$name, $($alias),*],
                expected: $expected,
                set: |config, value| {
                    config.$field = Field::read(value.word()?)?;
                    Ok(())
                },
                text: |config| (config.$field != Config::default().$field).then(|| Field::text(&config.$field)),
                range: &[$($in_range)?],
                in_vain: &[$($only)?],
            },)*
            $($(Row {
                names: &[$inert, $($inert_alias),*],
                expected: $inert_expected,
                set: |config, value| {
                    let asks: fn(&Value<'_>) -> Result<bool, ConfigError> = $asks;
                    if asks(value)? {
                        config.inert.insert($inert, value.to_string());
                    } else {
                        config.inert.remove($inert);
                    }
                    Ok(())
                },
                text: |config| config.inert.get($inert).cloned(),
                range: &[],
                in_vain: &[($reason, Backing::ALL)],
            },)*)*
        ];

        macro_rules! table {
            () => { concat!(
"All `_mb` options are whole MiB (1048576 bytes), but for `limit_mb` and `headroom_mb`, which may have a fraction
(`1.5`) that is whole bytes. *Inert* options are checked and then have no effect here. Some others have one on
mapped memory only. [`Config::ignored`] lists those that were given in vain.

| option | value | default | effect |
| --- | --- | --- | --- |
",
                $("| `", $name, "`", $(", `", $alias, "`",)* " | ", $expected, " | ", $default, " | ", $effect, " |\n",)*
                $($("| `", $inert, "`", $(", `", $inert_alias, "`",)* " | ", $inert_expected, " | ", $inert_default,
                    " | inert: ", $reason, " |\n",)*)*
"
Some malformed options that PyTorch accepts are errors here: numbers with text behind them (PyTorch reads `12abc`
as 12), negative numbers (which it wraps), sizes of 2^64 bytes and more (which it cuts off), missing colons (after
which it misassigns words), commas at the end (which it skips), and a reserve that cannot be read (of which it only
warns).
",
            ) };
        }
        pub(super) use table;
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
        "a power of two of MiB, from 2 to 8796093022208", "up to 16",
        "mapped memory only: [`Config::frame`]", MAPPED_ONLY;
    "split_frames" => split_frames, "`off` or `on`", "`off`", "mapped memory only: [`SplitFrames`]", MAPPED_ONLY;
    "cross_stream" => cross_stream, "`off`, `ready` or `wait`", "`ready`",
        "reuse between streams: [`CrossStream`]; PyTorch's is `off`";
    "limit_mb" => limit if |config| config.limit != Some(0),
        "MiB greater than 0, such as 512 or 0.5; leave the option out for no limit", "none", "limit in bytes";
    "limit_free_fraction" => limit_free_fraction
        if |config| config.limit_free_fraction.is_none_or(|fraction| fraction > 0.0 && fraction <= 1.0),
        "a fraction in (0, 1], 0 excluded", "none", "limit, as a share of what is free on the device or held from it, asked whenever more is taken";
    "headroom_mb" => headroom, "MiB, such as 512 or 0.5", "0", "left free on the device for libraries";
    "history" => history, "a whole number of entries, at most 4294967295", "0 = off",
        "length of the ring of trace entries";
    "oom_snapshot" => oom_snapshot, "a path that ends in .pickle, .pkl or .json, without `,:[]`", "none",
        "the first refused request saves a snapshot: [`Config::oom_snapshot`]";
    "tags" => tags, "`off`, `scope` or `span`", "`scope`", "where names of allocations come from: [`TagSource`]";
    "no_cache" => no_cache, "`True` or `False`", "`False`", "every allocation goes straight to the driver, and what \
        was dropped goes back at the next one; private pools keep theirs";
    "quarantine_mb" => quarantine, "MiB, such as 64 or 0.5", "64 on a device that checks programs, else 0",
        "freed memory that serves no request while there is other: [`Config::quarantine`]";

    inert "the driver's pool is never used, and `cudaMallocAsync` is an error" {
        "backend" => backend, "`native`", "`native`";
    }
    inert "no lock is ever held during a driver call" {
        "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" => |value| flag(value).map(|_| false),
            "`True` or `False`", "";
    }
    inert "the sizes of blocks and segments follow fixed rules" {
        "large_segment_size_mb" => |value| mib_from(value, 11, Some(20)),
            "a whole number of MiB greater than 10", "20";
        "max_split_size_mb" => |value| mib_from(value, 11, None),
            "a whole number of MiB greater than 10", "";
        "max_non_split_rounding_mb" => |value| mib_from(value, 11, None),
            "a whole number of MiB greater than 10", "";
        "roundup_power2_divisions" => divisions,
            "a power of two or 0, or a list such as `[64:8,128:4,>:1]`", "0 = off";
    }
    inert "unused memory goes back when a request needs it, whatever its age" {
        "garbage_collection_threshold" => open_fraction,
            "a fraction in (0, 1), both ends excluded", "off";
    }
    inert "`backing:paged` does what it asks for" {
        "expandable_segments" => flag, "`True` or `False`", "`False`";
    }
    inert "addresses are reserved as they are needed" {
        "expandable_segments_reserve" => reserve,
            "a positive fraction such as `0.5` or a size in GiB such as `40G`", "";
        "expandable_segments_reserve_by_class" => reserve_by_class, "a list such as `[name:0.5,other:40G]`", "";
    }
    inert "blocks used by several streams are not reused inside a graph capture" {
        "graph_capture_record_stream_reuse" => flag, "`True` or `False`", "`False`";
    }
    inert "pinned host memory has a pool of its own, which has options of its own" {
        "pinned_use_background_threads" => flag, "`True` or `False`", "`False`";
        "pinned_max_round_threshold_mb" => |value| mib_from(value, 0, None),
            "a whole number of MiB", "";
        "pinned_max_cached_size_mb" => |value| mib_from(value, 0, None),
            "a whole number of MiB", "";
        "pinned_use_cuda_host_register" | "pinned_use_hip_host_register" => flag,
            "`True` or `False`", "`False`";
        "pinned_num_register_threads" => |value| number(value, Some(1), |n| n.is_power_of_two() && n <= 128),
            "a power of two in 1..=128", "1";
        "pinned_reserve_segment_size_mb" => |value| mib_from(value, 1, None),
            "a whole number of MiB greater than 0", "";
        "pinned_free_catch_all" => flag, "`True` or `False`", "`False`";
    }
}

/// The known spelling that is nearest to `name`, if it is near enough to be what was meant.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    const LONGEST: usize = 64;
    const FARTHEST: usize = 5;
    let length = name.chars().count();
    if length > LONGEST {
        return None;
    }
    let known = || ROWS.iter().flat_map(|row| row.names).copied();
    let (distance, closest) = known().map(|known| (edit_distance(name, known), known)).min()?;
    let near = distance <= FARTHEST && distance * 2 < length;
    if near { Some(closest) } else { known().find(|known| length >= 4 && known.starts_with(name)) }
}

/// Insertions, deletions and substitutions that turn one text into the other, ignoring ASCII case.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let above = row[j + 1];
            let substituted = diagonal + usize::from(!ca.eq_ignore_ascii_case(cb));
            row[j] = left;
            left = substituted.min(above + 1).min(left + 1);
            diagonal = above;
        }
        row[b.len()] = left;
    }
    row[b.len()]
}

/// An option that was given, is valid, and has no effect: [`Config::ignored`].
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
