//! The canonical option string of a [`Config`].

use std::fmt;

use super::Config;
use super::keys::Key;
use super::values::MIB;

/// The options that differ from the default, in the order of the documentation: an option string
/// that gives this configuration again. Limit and headroom may be no whole MiB; they are then
/// printed with a fraction.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for key in Key::ALL {
            if let Some(value) = text_of(self, *key) {
                write!(f, "{separator}{}:{value}", key.name())?;
                separator = ",";
            }
        }
        Ok(())
    }
}

/// The value of an option in an option string; `None` if it has its default.
pub(super) fn text_of(config: &Config, key: Key) -> Option<String> {
    let default = Config::default();
    match key {
        Key::PerProcessMemoryFraction => {
            // A sum, because zero may have a sign, which option strings do not take.
            differing(config.per_process_memory_fraction + 0.0, default.per_process_memory_fraction).map(plain)
        }
        Key::ThrowOnOom => flag(config.fail_fast),
        Key::ExpandableSegments => flag(config.expandable_segments),
        Key::Backing => differing(config.backing, default.backing).map(plain),
        Key::Granule => config.granule.map(mib),
        Key::Frame => config.frame.map(mib),
        Key::SplitFrames => differing(config.split_frames, default.split_frames).map(plain),
        Key::CrossStream => differing(config.cross_stream, default.cross_stream).map(plain),
        Key::Limit => config.limit.map(mib),
        Key::LimitFreeFraction => config.limit_free_fraction.map(plain),
        Key::Headroom => differing(config.headroom, default.headroom).map(mib),
        Key::History => differing(config.history, default.history).map(plain),
        Key::OomSnapshot => config.oom_snapshot.as_ref().map(|path| path.display().to_string()),
        Key::Tags => differing(config.tags, default.tags).map(plain),
        Key::NoCache => flag(config.no_cache),
        Key::Backend | Key::ReleaseLock => None,
        Key::LargeSegmentSize
        | Key::MaxSplitSize
        | Key::MaxNonSplitRounding
        | Key::GarbageCollectionThreshold
        | Key::RoundupPower2Divisions
        | Key::ExpandableReserve
        | Key::ExpandableReserveByClass
        | Key::GraphCaptureReuse
        | Key::PinnedBackgroundThreads
        | Key::PinnedMaxRoundThreshold
        | Key::PinnedMaxCachedSize
        | Key::PinnedHostRegister
        | Key::PinnedRegisterThreads
        | Key::PinnedReserveSegment
        | Key::PinnedFreeCatchAll => config.inert.0.get(&key).cloned(),
    }
}

fn differing<T: PartialEq>(value: T, default: T) -> Option<T> {
    (value != default).then_some(value)
}

fn flag(value: bool) -> Option<String> {
    value.then(|| "True".to_owned())
}

fn plain(value: impl fmt::Display) -> String {
    value.to_string()
}

/// Bytes in MiB: a whole number, or a decimal fraction with every digit.
pub(super) fn mib(bytes: u64) -> String {
    let mut text = (bytes / MIB).to_string();
    let mut rest = bytes % MIB;
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
