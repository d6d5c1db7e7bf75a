//! A recorded program's own use of memory over time, whatever allocator serves it.
//!
//! Events are numbered from 1 and put into buckets, each represented by the event after which most
//! is requested, so that no peak is lost however many events a bucket has.

use std::collections::HashMap;

use serde::Serialize;

use crate::headline::{WITHOUT_TAG, headlines};
use crate::input::{Event, Labels, Program, RecordedOom, Site};
use crate::text::plural;

/// The most buckets.
const BUCKETS: u64 = 1000;
/// The most groups of a grouping; others are put together.
const GROUPS: usize = 24;
/// The name of the group of all others.
pub const OTHERS: &str = "others";
/// The most frames of a call stack that are shown.
const FRAMES: usize = 128;

/// The least and the most of a figure in each bucket.
#[derive(Debug, Clone, Default, Serialize, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Range {
    pub min: Vec<u64>,
    pub max: Vec<u64>,
}

impl Range {
    /// Empty ranges.
    pub fn new(buckets: usize) -> Range {
        Range { min: vec![u64::MAX; buckets], max: vec![0; buckets] }
    }

    /// Adds a value; whether it is the greatest of the bucket so far.
    pub fn add(&mut self, bucket: usize, value: u64) -> bool {
        let greatest = self.min[bucket] == u64::MAX || value > self.max[bucket];
        self.min[bucket] = self.min[bucket].min(value);
        self.max[bucket] = self.max[bucket].max(value);
        greatest
    }
}

/// How the events of a program are put into buckets.
#[derive(Debug, Clone, Serialize)]
pub struct Buckets {
    /// The number of buckets.
    pub n: usize,
    /// The number of allocations, frees and uses on other streams.
    pub events: u64,
    /// In each bucket, the event after which most memory is requested.
    pub at: Vec<u64>,
    /// The iteration of that event; `None` if the program has no iterations.
    pub iteration: Option<Vec<u32>>,
}

impl Buckets {
    fn new(program: &Program) -> Buckets {
        let events = events(program).count() as u64;
        let n = events.min(BUCKETS) as usize;
        Buckets { n, events, at: vec![0; n], iteration: None }
    }

    /// The bucket of an event, which is numbered from 1.
    pub fn of(&self, event: u64) -> usize {
        let before = u128::from(event.clamp(1, self.events.max(1)) - 1);
        (before * self.n as u128 / u128::from(self.events.max(1))) as usize
    }
}

/// A moment of a program, as that when it had requested most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Peak {
    pub bucket: usize,
    pub event: u64,
    pub bytes: u64,
    pub blocks: u64,
    #[serde(skip)]
    pub iteration: u32,
}

/// The live memory of a group of allocations over time.
#[derive(Debug, Clone, Serialize)]
pub struct Group {
    /// A short name.
    pub name: String,
    /// All that is known: the frames of a call stack, one a line.
    pub detail: String,
    /// Its allocations in the whole program.
    pub allocs: u64,
    /// Live bytes and blocks at the event of each bucket.
    pub bytes: Vec<u64>,
    /// The same in blocks.
    pub blocks: Vec<u64>,
    /// Live bytes at the profile's moment.
    #[serde(skip)]
    pub peak_bytes: u64,
    /// Live blocks at the profile's moment.
    #[serde(skip)]
    pub peak_blocks: u64,
}

/// A way to group allocations.
#[derive(Debug, Clone, Serialize)]
pub struct Grouping {
    /// What they are grouped by.
    pub by: &'static str,
    /// A heading for it.
    pub title: &'static str,
    /// The groups, the one with most bytes at the peak first; the last may be all others.
    pub rows: Vec<Group>,
}

impl Grouping {
    /// Whether all names that the program gave are numbers, as of its steps.
    pub fn has_numbers(&self) -> bool {
        let is_number = |name: &str| name.strip_prefix(NUMBER).is_some_and(|rest| rest.parse::<f64>().is_ok());
        let mut names = self.rows.iter().map(|row| &*row.name).filter(|&name| name != OTHERS && name != WITHOUT_TAG);
        self.by == Tags::BY && names.all(is_number)
    }
}

/// A program's own use of memory.
#[derive(Debug, Clone, Serialize)]
pub struct Profile {
    /// The buckets.
    pub buckets: Buckets,
    /// Requested bytes.
    pub requested: Range,
    /// Where it is highest, with requests that were refused at the end.
    pub peak: Peak,
    /// When groups are compared: at a refusal, without the refused request, or else at the peak.
    pub moment: Peak,
    /// The groupings that say something about this program, the one that says most first.
    pub groups: Vec<Grouping>,
}

/// The events that count: all but beginnings of iterations.
fn events(program: &Program) -> impl Iterator<Item = &Event> {
    program.events.iter().filter(|event| !matches!(event, Event::Iteration(_)))
}

impl Profile {
    /// The profile of a program. Its moment is the refusal that the recording tells of, if there is
    /// one.
    pub fn of(program: &Program) -> Profile {
        Profile::with(program, program.recorded.oom(), None)
    }

    /// The same with the moment before an event, which is numbered from 1.
    pub fn before(program: &Program, event: u64) -> Profile {
        Profile::with(program, None, Some(event))
    }

    fn with(program: &Program, oom: Option<&RecordedOom>, before: Option<u64>) -> Profile {
        let mut buckets = Buckets::new(program);
        let mut requested = Range::new(buckets.n);
        let mut iterations = vec![0; buckets.n];
        let (mut sizes, mut live, mut blocks, mut iteration, mut event) = (vec![0; program.slots as usize], 0, 0, 0, 0);
        let mut peak = Peak::default();
        let mut moment = None;
        for found in &program.events {
            match *found {
                Event::Alloc { slot, bytes, .. } => {
                    sizes[slot as usize] = bytes;
                    live += bytes;
                    blocks += 1;
                }
                Event::Free { slot } => {
                    live -= std::mem::take(&mut sizes[slot as usize]);
                    blocks -= 1;
                }
                Event::RecordStream { .. } => {}
                Event::Iteration(number) => {
                    iteration = number;
                    continue;
                }
            }
            event += 1;
            let bucket = buckets.of(event);
            if requested.add(bucket, live) {
                buckets.at[bucket] = event;
                iterations[bucket] = iteration;
            }
            let now = Peak { bucket, event, bytes: live, blocks, iteration };
            if live > peak.bytes {
                peak = now;
            }
            if let Some(RecordedOom { bytes, is_last, .. }) = oom.filter(|oom| oom.event == event) {
                let replayed = if *is_last { (*bytes, 1) } else { (0, 0) };
                moment = Some(Peak { bytes: live - replayed.0, blocks: blocks - replayed.1, ..now });
            }
            if before == Some(event + 1) {
                moment = Some(now);
            }
        }
        let moment = if oom.is_some() || before.is_some() { moment.unwrap_or_default() } else { peak };
        if moment.event > 0 && moment.bucket != peak.bucket {
            buckets.at[moment.bucket] = moment.event;
        }
        if program.events.iter().any(|event| matches!(event, Event::Iteration(_))) {
            buckets.iteration = Some(iterations);
        }
        let mut groups = Vec::new();
        if program.sites.iter().any(|site| site.stack != 0) {
            groups.push(grouping(program, &buckets, moment, &Stacks(&program.labels)));
        }
        if program.sites.iter().any(|site| site.tag != 0) {
            let tags = grouping(program, &buckets, moment, &Tags(&program.labels));
            // Names that the program gave say more than places in its code, and numbers less.
            let place = if tags.has_numbers() { groups.len() } else { 0 };
            groups.insert(place, tags);
        }
        groups.push(grouping(program, &buckets, moment, &Sizes));
        if program.streams_used() > 1 {
            groups.push(grouping(program, &buckets, moment, &Streams(&program.streams)));
        }
        Profile { buckets, requested, peak, moment, groups }
    }
}

/// Assigns allocations to groups.
trait Key {
    const BY: &'static str;
    const TITLE: &'static str;

    /// The key of an allocation's group.
    fn of(&self, bytes: u64, stream: u16, site: Site) -> u64;

    /// The names of the groups with these keys.
    fn names(&self, keys: &[u64]) -> Vec<String>;

    fn detail(&self, _: u64) -> String {
        String::new()
    }
}

/// What stands before a tag that is a number, which alone would be read as a figure.
const NUMBER: &str = "tag ";

struct Tags<'a>(&'a Labels);
struct Stacks<'a>(&'a Labels);
struct Sizes;
struct Streams<'a>(&'a [u64]);

impl Key for Tags<'_> {
    const BY: &'static str = "tag";
    const TITLE: &'static str = "Tag";

    fn of(&self, _: u64, _: u16, site: Site) -> u64 {
        site.tag.into()
    }

    fn names(&self, keys: &[u64]) -> Vec<String> {
        let text = |key: u64| u32::try_from(key).ok().and_then(|tag| self.0.text(tag));
        let name = |text: &str| if text.parse::<f64>().is_ok() { format!("{NUMBER}{text}") } else { text.to_owned() };
        keys.iter().map(|&key| text(key).map_or_else(|| WITHOUT_TAG.to_owned(), name)).collect()
    }
}

impl Key for Stacks<'_> {
    const BY: &'static str = "stack";
    const TITLE: &'static str = "Call stack";

    fn of(&self, _: u64, _: u16, site: Site) -> u64 {
        site.stack.into()
    }

    fn names(&self, keys: &[u64]) -> Vec<String> {
        headlines(self.0, keys.iter().map(|&key| u32::try_from(key).unwrap_or(0)))
    }

    fn detail(&self, key: u64) -> String {
        let mut calls = self.0.calls(u32::try_from(key).unwrap_or(0)).map(|call| call.to_string());
        let mut lines: Vec<String> = calls.by_ref().take(FRAMES).collect();
        let more = calls.count();
        if more > 0 {
            lines.push(format!("and {}", plural(more as u64, "more frame")));
        }
        lines.join("\n")
    }
}

impl Key for Sizes {
    const BY: &'static str = "size";
    const TITLE: &'static str = "Size";

    /// The number of bits of the size in units of 1 KiB.
    fn of(&self, bytes: u64, _: u16, _: Site) -> u64 {
        u64::from(u64::BITS - (bytes.saturating_sub(1) >> 10).leading_zeros())
    }

    fn names(&self, keys: &[u64]) -> Vec<String> {
        let name = |&key| match key {
            0 => "up to 1 KiB".to_owned(),
            _ => format!("{} to {}", size(key - 1), size(key)),
        };
        keys.iter().map(name).collect()
    }
}

fn size(key: u64) -> String {
    let kib = 1_u128 << key;
    let (number, unit) = [(30, "TiB"), (20, "GiB"), (10, "MiB")]
        .into_iter()
        .find(|&(bits, _)| kib >> bits > 0)
        .map_or((kib, "KiB"), |(bits, unit)| (kib >> bits, unit));
    format!("{number} {unit}")
}

impl Key for Streams<'_> {
    const BY: &'static str = "stream";
    const TITLE: &'static str = "Stream";

    fn of(&self, _: u64, stream: u16, _: Site) -> u64 {
        stream.into()
    }

    fn names(&self, keys: &[u64]) -> Vec<String> {
        keys.iter().map(|key| format!("stream {key}")).collect()
    }

    /// The recording's own number.
    fn detail(&self, key: u64) -> String {
        let number = usize::try_from(key).ok().and_then(|index| self.0.get(index));
        number.filter(|&&number| number != key).map_or_else(String::new, |number| format!("recorded as {number}"))
    }
}

/// The live bytes and blocks of a group.
#[derive(Clone, Copy, Default)]
struct Live {
    bytes: u64,
    blocks: u64,
    allocs: u64,
    /// The most bytes at any of the buckets' events.
    most: u64,
    /// Bytes at the peak.
    peak: u64,
}

/// Groups the live blocks of a program at the events of its buckets.
fn grouping<K: Key>(program: &Program, buckets: &Buckets, peak: Peak, key: &K) -> Grouping {
    let (keys, first) = groups_over_time(program, buckets, peak, key, None);
    let mut order: Vec<usize> = (0..keys.len()).filter(|&group| first[group].allocs > 0).collect();
    // Those that are largest at the peak, and then those that are largest at any time.
    order.sort_by_key(|&group| std::cmp::Reverse((first[group].peak, first[group].most)));
    let at_peak = order.len().min(GROUPS / 2);
    order[at_peak..].sort_by_key(|&group| std::cmp::Reverse((first[group].most, first[group].allocs)));
    let shown = order.len().min(GROUPS);
    let shown_keys: Vec<u64> = order[..shown].iter().map(|&group| keys[group]).collect();
    let mut rows: Vec<Group> = distinct(key.names(&shown_keys))
        .into_iter()
        .zip(&order)
        .map(|(name, &group)| row(name, key.detail(keys[group]), first[group].allocs, buckets.n))
        .collect();
    if order.len() > shown {
        let allocs = order[shown..].iter().map(|&group| first[group].allocs).sum();
        rows.push(row(OTHERS.to_owned(), format!("{} more groups", order.len() - shown), allocs, buckets.n));
    }
    // The row of each group.
    let mut row_of = vec![shown; keys.len()];
    order[..shown].iter().enumerate().for_each(|(row, &group)| row_of[group] = row);
    groups_over_time(program, buckets, peak, key, Some((&mut rows, &row_of)));
    let others = rows.split_off(shown.min(rows.len()));
    rows.sort_by_key(|row| std::cmp::Reverse(row.peak_bytes));
    rows.extend(others);
    Grouping { by: K::BY, title: K::TITLE, rows }
}

/// The names, of which equal ones are numbered.
fn distinct(mut names: Vec<String>) -> Vec<String> {
    for at in 1..names.len() {
        let (before, [name, ..]) = names.split_at_mut(at) else { break };
        let numbered = (2..).map(|number| format!("{name} ({number})"));
        if let Some(other) = [name.clone()].into_iter().chain(numbered).find(|name| !before.contains(name)) {
            *name = other;
        }
    }
    names
}

fn row(name: String, detail: String, allocs: u64, buckets: usize) -> Group {
    let (bytes, blocks) = (vec![0; buckets], vec![0; buckets]);
    Group { name, detail, allocs, bytes, blocks, peak_bytes: 0, peak_blocks: 0 }
}

/// Goes through a program and adds up its groups at the events of the buckets: into rows, or else
/// only the most that each group has. Returns the keys of the groups with their sums.
fn groups_over_time<K: Key>(
    program: &Program,
    buckets: &Buckets,
    peak: Peak,
    key: &K,
    mut rows: Option<(&mut Vec<Group>, &[usize])>,
) -> (Vec<u64>, Vec<Live>) {
    let (mut numbers, mut keys, mut groups) = (HashMap::new(), Vec::new(), Vec::<Live>::new());
    let mut slots = vec![(0, 0); program.slots as usize];
    let (mut sites, mut event, mut moments) = (program.sites.iter(), 0, buckets.at.iter().peekable());
    let mut refused = program.recorded.ooms.iter().filter(|oom| oom.is_last).map(|oom| oom.event).peekable();
    for found in events(program) {
        event += 1;
        match *found {
            Event::Alloc { slot, bytes, stream } => {
                let key = key.of(bytes, stream, sites.next().copied().unwrap_or_default());
                // What was refused is never alive.
                if refused.next_if_eq(&event).is_some() {
                    slots[slot as usize] = (usize::MAX, 0);
                } else {
                    let group = *numbers.entry(key).or_insert_with(|| {
                        keys.push(key);
                        groups.push(Live::default());
                        groups.len() - 1
                    });
                    slots[slot as usize] = (group, bytes);
                    let live = &mut groups[group];
                    (live.bytes, live.blocks, live.allocs) = (live.bytes + bytes, live.blocks + 1, live.allocs + 1);
                }
            }
            Event::Free { slot } => {
                let (group, bytes) = slots[slot as usize];
                if let Some(live) = groups.get_mut(group) {
                    (live.bytes, live.blocks) = (live.bytes - bytes, live.blocks - 1);
                }
            }
            _ => {}
        }
        if let Some((rows, row_of)) = &mut rows
            && event == peak.event
        {
            for (live, &row) in groups.iter().zip(*row_of) {
                if let Some(row) = rows.get_mut(row) {
                    row.peak_bytes += live.bytes;
                    row.peak_blocks += live.blocks;
                }
            }
        }
        if moments.next_if_eq(&&event).is_none() {
            continue;
        }
        let bucket = buckets.of(event);
        match &mut rows {
            None => groups.iter_mut().for_each(|live| {
                live.most = live.most.max(live.bytes);
                live.peak = if event <= peak.event { live.bytes } else { live.peak };
            }),
            Some((rows, row_of)) => {
                for (live, &row) in groups.iter().zip(*row_of) {
                    if let Some(row) = rows.get_mut(row) {
                        row.bytes[bucket] += live.bytes;
                        row.blocks[bucket] += live.blocks;
                    }
                }
            }
        }
    }
    (keys, groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input;

    fn profile(text: &str) -> Profile {
        let programs = input::read("p.trace".as_ref(), text.as_bytes()).unwrap();
        Profile::of(&programs[0])
    }

    #[test]
    fn the_peak_and_what_is_alive_there() {
        let profile =
            profile("i 1\na 1 1000 0\na 2 5000 7\ni 2\na 3 3000000 0\nf 2 7\na 4 100 0\nf 3 0\nf 1 0\nf 4 0\n");
        let Peak { event, bytes, blocks, iteration, .. } = profile.peak;
        assert_eq!((event, bytes, blocks, iteration), (3, 3_006_000, 3, 2));
        assert_eq!(profile.buckets.iteration, Some(vec![1, 1, 2, 2, 2, 2, 2, 2]));
        assert_eq!(profile.requested.max, [1000, 6000, 3_006_000, 3_001_000, 3_001_100, 1100, 100, 0]);
        let sizes = &profile.groups[0];
        let at_peak: Vec<_> = sizes.rows.iter().map(|row| (&*row.name, row.peak_bytes, row.peak_blocks)).collect();
        assert_eq!(at_peak, [("2 MiB to 4 MiB", 3_000_000, 1), ("4 KiB to 8 KiB", 5000, 1), ("up to 1 KiB", 1000, 1)]);
        let streams: Vec<_> = profile.groups[1].rows.iter().map(|row| (&*row.name, row.bytes[4])).collect();
        assert_eq!(streams, [("stream 0", 3_001_100), ("stream 1", 0)]);
        assert_eq!(profile.groups[1].rows[1].detail, "recorded as 7");
    }

    #[test]
    fn buckets_hide_no_peak_and_groups_add_up() {
        let mut text = String::new();
        for id in 0..5000_u64 {
            text += &format!("a {id} {} {}\n", 512_u64 << (id % 28), id % 40);
            if id != 3210 {
                text += &format!("f {id} {}\n", id % 40);
            }
        }
        let profile = profile(&text);
        assert_eq!(profile.buckets.n, 1000);
        let most = profile.requested.max.iter().max();
        assert_eq!(most, Some(&profile.peak.bytes));
        assert_eq!(profile.requested.max[profile.peak.bucket], profile.peak.bytes);
        for grouping in &profile.groups {
            assert_eq!(grouping.rows.len(), GROUPS + 1, "{}", grouping.by);
            for bucket in 0..1000 {
                let sum: u64 = grouping.rows.iter().map(|row| row.bytes[bucket]).sum();
                assert_eq!(sum, profile.requested.max[bucket]);
            }
            assert_eq!(grouping.rows.iter().map(|row| row.peak_bytes).sum::<u64>(), profile.peak.bytes);
            assert_eq!(grouping.rows.iter().map(|row| row.allocs).sum::<u64>(), 5000);
        }
    }

    #[test]
    fn groups_of_one_name_are_numbered() {
        let named = |names: &[&str]| distinct(names.iter().map(|&name| name.to_owned()).collect());
        assert_eq!(named(&["a", "b", "a", "a (2)", "a"]), ["a", "b", "a (2)", "a (2) (2)", "a (3)"]);
        assert_eq!(named(&[]), [""; 0]);
    }

    #[test]
    fn names_come_before_places_and_numbers_after_them() {
        let groups = |tag: &str| {
            let frame = r#"{"name": "forward", "filename": "train.py", "line": 7}"#;
            let text = format!(
                r#"{{"device_traces": [[{{"action": "alloc", "addr": 512, "size": 100, "frames": [{frame}],
                "user_metadata": "{tag}"}}, {{"action": "alloc", "addr": 1024, "size": 100}}]]}}"#
            );
            let profile = Profile::of(&input::read("p.json".as_ref(), text.as_bytes()).unwrap()[0]);
            profile.groups.iter().map(|group| (group.by, group.has_numbers())).collect::<Vec<_>>()
        };
        assert_eq!(groups("weights"), [("tag", false), ("stack", false), ("size", false)]);
        assert_eq!(groups("12"), [("stack", false), ("tag", true), ("size", false)]);
    }

    #[test]
    fn the_moment_may_be_that_before_an_event() {
        let text = "i 1\na 1 1000 0\na 2 3000 7\nf 2 7\na 3 500 0\n";
        let programs = input::read("p.trace".as_ref(), text.as_bytes()).unwrap();
        let profile = Profile::before(&programs[0], 4);
        assert_eq!((profile.peak.event, profile.moment.event, profile.moment.bytes), (2, 3, 1000));
        assert_eq!(profile.groups[0].rows.iter().map(|row| row.peak_bytes).sum::<u64>(), 1000);
        assert_eq!(Profile::before(&programs[0], 1).moment, Peak::default(), "nothing was live");
        assert_eq!((programs[0].streams.len(), programs[0].streams_used()), (2, 2));
    }

    #[test]
    fn programs_without_events_have_empty_profiles() {
        let profile = Profile::of(&Program::default());
        assert_eq!((profile.buckets.n, profile.peak.bytes, profile.groups[0].rows.len()), (0, 0, 0));
    }
}
