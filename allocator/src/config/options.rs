//! What each option does to a [`Config`], and the options that are accepted and do nothing here.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound::{Excluded, Included};
use std::path::PathBuf;

use super::error::ConfigError;
use super::keys::Key;
use super::parse::{Pair, Value};
use super::values::{MIB, Reader, divisions, reserve};
use super::{Backing, Config, CrossStream, SplitFrames, TagSource};

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

/// The inert options that were given and ask for something, with their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Inert(pub(super) BTreeMap<Key, String>);

/// Several of them, each reason once.
pub(crate) fn listed(ignored: &[IgnoredOption]) -> String {
    let reasons = ignored.chunk_by(|one, other| one.reason == other.reason).filter_map(|options| {
        let names: Vec<String> = options.iter().map(|option| format!("{}:{}", option.key, option.value)).collect();
        Some(format!("{} ({})", names.join(", "), options.first()?.reason))
    });
    reasons.collect::<Vec<_>>().join("; ")
}

/// Why an option has no effect on memory that comes as `backing` says; `None` if it has one.
///
pub(super) const fn without_effect(key: Key, backing: Backing) -> Option<&'static str> {
    Some(match (key, backing) {
        (Key::LargeSegmentSize | Key::MaxSplitSize | Key::MaxNonSplitRounding | Key::RoundupPower2Divisions, _) => {
            "the sizes of blocks and segments follow fixed rules"
        }
        (Key::GarbageCollectionThreshold, _) => "unused memory goes back when a request needs it, whatever its age",
        (Key::Granule | Key::Frame, Backing::Segments) => "for mapped memory only, and this memory comes in segments",
        (Key::ExpandableSegments, Backing::Paged) => "mapped memory, which this is, does what it asks for",
        (Key::ExpandableSegments, Backing::Segments) => "what it asks for is `backing:paged`",
        (Key::ExpandableReserve | Key::ExpandableReserveByClass, _) => "addresses are reserved as they are needed",
        (Key::GraphCaptureReuse, _) => "blocks used by several streams are not reused inside a graph capture",
        (
            Key::PinnedBackgroundThreads
            | Key::PinnedMaxRoundThreshold
            | Key::PinnedMaxCachedSize
            | Key::PinnedHostRegister
            | Key::PinnedRegisterThreads
            | Key::PinnedReserveSegment
            | Key::PinnedFreeCatchAll,
            _,
        ) => "page-locked memory has a pool of its own, which has options of its own",
        _ => return None,
    })
}

/// Sets one option.
pub(super) fn set(config: &mut Config, pair: &Pair<'_>) -> Result<(), ConfigError> {
    let key = pair.key;
    let word = || Reader::word_of(pair);
    match key {
        Key::LargeSegmentSize | Key::MaxSplitSize | Key::MaxNonSplitRounding => {
            let bytes = word()?.mib()?;
            if bytes <= 10 * MIB {
                return Err(word()?.out_of_range());
            }
            keep_if(key != Key::LargeSegmentSize || bytes != 20 * MIB, config, pair);
        }
        Key::GarbageCollectionThreshold => {
            word()?.fraction(Excluded(0.0), Excluded(1.0))?;
            keep(config, pair);
        }
        Key::RoundupPower2Divisions => keep_if(divisions(pair)?, config, pair),
        Key::PerProcessMemoryFraction => {
            config.per_process_memory_fraction = word()?.fraction(Included(0.0), Included(1.0))?;
        }
        Key::ThrowOnOom => config.fail_fast = word()?.flag()?,
        Key::Backend => backend(word()?)?,
        // The heap's lock is never held across a driver call, so `True` describes what is always
        // so.
        Key::ReleaseLock => {
            word()?.flag()?;
        }
        Key::ExpandableSegments => config.expandable_segments = word()?.flag()?,
        Key::ExpandableReserve => {
            reserve(word()?)?;
            keep(config, pair);
        }
        Key::ExpandableReserveByClass => {
            for entry in Reader::list_of(pair)? {
                reserve(Reader::part(key, entry.value))?;
            }
            keep(config, pair);
        }
        Key::GraphCaptureReuse | Key::PinnedBackgroundThreads | Key::PinnedHostRegister | Key::PinnedFreeCatchAll => {
            keep_if(word()?.flag()?, config, pair);
        }
        Key::PinnedMaxRoundThreshold | Key::PinnedMaxCachedSize => {
            word()?.mib()?;
            keep(config, pair);
        }
        Key::PinnedRegisterThreads => {
            let threads = word()?.integer()?;
            if !threads.is_power_of_two() || threads > 128 {
                return Err(word()?.out_of_range());
            }
            keep_if(threads != 1, config, pair);
        }
        Key::PinnedReserveSegment => {
            if word()?.mib()? == 0 {
                return Err(word()?.out_of_range());
            }
            keep(config, pair);
        }
        Key::Backing => config.backing = word()?.choice(Backing::ALL, Backing::name)?,
        Key::Granule => config.granule = Some(word()?.mib()?),
        Key::Frame => config.frame = Some(word()?.mib()?),
        Key::SplitFrames => config.split_frames = word()?.choice(SplitFrames::ALL, SplitFrames::name)?,
        Key::CrossStream => config.cross_stream = word()?.choice(CrossStream::ALL, CrossStream::name)?,
        Key::Limit => config.limit = Some(word()?.mib_of_bytes()?),
        Key::LimitFreeFraction => {
            config.limit_free_fraction = Some(word()?.fraction(Excluded(0.0), Included(1.0))?);
        }
        Key::Headroom => config.headroom = word()?.mib_of_bytes()?,
        Key::History => {
            let entries = word()?.integer()?;
            config.history = u32::try_from(entries).or_else(|_| Err(word()?.out_of_range()))?;
        }
        Key::OomSnapshot => {
            let path = PathBuf::from(word()?.text());
            let ends_in = |ending: &&str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending));
            if !["pickle", "pkl", "json"].iter().any(ends_in) {
                return Err(word()?.invalid());
            }
            config.oom_snapshot = Some(path);
        }
        Key::Tags => config.tags = word()?.choice(TagSource::ALL, TagSource::name)?,
        Key::NoCache => config.no_cache = word()?.flag()?,
    }
    Ok(())
}

fn backend(value: Reader<'_>) -> Result<(), ConfigError> {
    match value.text() {
        "native" => Ok(()),
        "cudaMallocAsync" => Err(value.unavailable(
            "the driver's own pool is not used; leave `backend` out, or use `no_cache:True` to cache nothing here",
        )),
        _ => Err(value.invalid()),
    }
}

/// [`keep`]s an option if it asks for something other than the default.
fn keep_if(asks: bool, config: &mut Config, pair: &Pair<'_>) {
    if asks {
        keep(config, pair);
    } else {
        config.inert.0.remove(&pair.key);
    }
}

/// Remembers an option that has no effect here, so that it can be named and printed.
fn keep(config: &mut Config, pair: &Pair<'_>) {
    let text = match &pair.value {
        Value::Word(word) => word.text().to_owned(),
        Value::List(_, entries) => {
            let entries: Vec<String> =
                entries.iter().map(|entry| format!("{}:{}", entry.name.text(), entry.value.text())).collect();
            format!("[{}]", entries.join(","))
        }
    };
    config.inert.0.insert(pair.key, text);
}
