//! Answers to what a newcomer asks, each in one line: first what the recording says, then what
//! replays say.

use aquifer_trace::input::{Program, RecordedOom, Recorder};
use aquifer_trace::profile::{OTHERS, Profile};
use aquifer_trace::{WITHOUT_STACK, WITHOUT_TAG, headline};

use super::advice::{instead, needs};
use super::rows::{Advice, Answer};
use super::{Case, Study};
use crate::cards::smallest_card;
use crate::text::{Bytes, plural};

/// Groups that are named of those that hold most.
const NAMED: usize = 3;

/// What a refused request lacked beside what was free, if `live` bytes were live; 0 if enough was
/// free, in pieces. `None` if the recording does not tell what was free on the device.
pub(super) fn lacking(oom: &RecordedOom, live: u64) -> Option<u64> {
    let free = oom.capacity_bytes()?.saturating_sub(live);
    Some(oom.bytes.saturating_sub(free))
}

/// The size of a device, rounded up to what is shown, so that a device of that size suffices.
pub(super) fn room_of(bytes: u64) -> Bytes {
    const GIB: u64 = 1 << 30;
    let hundredths = (u128::from(bytes) * 100).div_ceil(u128::from(GIB));
    let up = u64::try_from(hundredths * u128::from(GIB) / 100).unwrap_or(bytes);
    Bytes(if bytes < GIB { bytes } else { up.max(bytes) })
}

/// A sentence about the groups that hold most at the profile's moment.
pub fn held_by(profile: &Profile) -> String {
    let Some(grouping) = profile.groups.first() else { return String::new() };
    let mut live: Vec<_> = grouping.rows.iter().filter(|group| group.peak_bytes > 0 && group.name != OTHERS).collect();
    live.sort_by_key(|group| std::cmp::Reverse(group.peak_bytes));
    let named = live.iter().take(NAMED).map(|group| match (grouping.by, Bytes(group.peak_bytes)) {
        ("size", bytes) => format!("{bytes} in blocks of {}", group.name),
        (_, bytes) => format!("{} {bytes}", group.name),
    });
    let named = named.collect::<Vec<_>>().join("; ");
    let numbers = if grouping.by == "tag" && live.iter().any(|group| group.name.starts_with("tag ")) {
        " The program itself names memory by numbers, as of its steps."
    } else {
        ""
    };
    if named.is_empty() { "Nothing was live.".to_owned() } else { format!("By {}: {named}.{numbers}", grouping.by) }
}

/// Says that a program that has `peak` bytes live at once is too large for a device.
pub fn too_large(peak: u64, device_bytes: u64) -> Option<String> {
    let more = peak.checked_sub(device_bytes).filter(|&more| more > 0)?;
    let [peak, more, size] = [peak, more, device_bytes].map(Bytes);
    Some(format!("{peak} are live at once, {more} more than the device of {size} has"))
}

/// The first line: what the program used, or what it was refused.
pub fn headline_of(program: &Program, profile: &Profile) -> String {
    let (peak, recorded) = (Bytes(profile.peak.bytes), &program.recorded);
    match recorded.oom() {
        Some(oom) => {
            let capacity = oom.capacity_bytes();
            let on = capacity.map_or_else(String::new, |bytes| format!(" on {}", Bytes(bytes)));
            format!("was refused {}{on}", Bytes(oom.bytes))
        }
        None if !program.has_history => format!("had {peak} live when the snapshot was taken"),
        None if recorded.begins_late => format!("uses at least {peak}"),
        None => format!("uses at most {peak}"),
    }
}

/// What the recording says, and whether the program is too large for the user's device.
pub fn of_recording(program: &Program, profile: &Profile, device_bytes: Option<u64>) -> Vec<Answer> {
    let (recorded, moment) = (&program.recorded, profile.moment);
    let live = moment.bytes;
    let mut what = match (recorded.oom(), device_bytes.and_then(|bytes| too_large(profile.peak.bytes, bytes))) {
        (Some(oom), _) => refusal(oom, live),
        (None, Some(too_large)) => format!("{too_large}. No request was refused in the recording."),
        (None, None) if !program.has_history => "Whether a request was refused is not recorded.".to_owned(),
        (None, None) => "No request was refused in the recording.".to_owned(),
    };
    let others = recorded.ooms.len().saturating_sub(1) as u64;
    let more = |count: u64, noun: &str, text: &str| (count > 0).then(|| format!(" {} {text}.", plural(count, noun)));
    what.extend(more(others, "other refusal", "in the recording"));
    let retried = "of more memory by the device after which the cache was released and the request served";
    what.extend(more(recorded.retries, "refusal", retried));
    what.extend(more(recorded.releases, "release", "of the cache, as by empty_cache"));
    if recorded.peak_held_bytes > 0 {
        let most = if program.has_history { "at most " } else { "" };
        what += &format!(" The allocator held {most}{}.", Bytes(recorded.peak_held_bytes));
    }
    let iteration = if profile.buckets.iteration.is_some() {
        format!(", in iteration {}", moment.iteration)
    } else {
        String::new()
    };
    let when = match recorded.oom() {
        _ if !program.has_history => "When the snapshot was taken: what came before is not known.".to_owned(),
        Some(oom) if oom.is_last => format!("At its last request, event {}{iteration}.", moment.event),
        Some(_) => format!("At event {} of {}{iteration}.", moment.event, profile.buckets.events),
        None => format!("Most is in use after event {} of {}{iteration}.", moment.event, profile.buckets.events),
    };
    let least = if recorded.begins_late && program.has_history { "At least " } else { "" };
    let held = format!("{least}{} in {}. {}", Bytes(live), plural(moment.blocks, "block"), held_by(profile));
    [
        ("What ran out", what),
        ("When", when),
        ("Who held it", held),
        ("Where in the code", place(program, profile)),
        ("Not recorded", unknown(program)),
    ]
    .map(|(question, answer)| Answer { question, answer })
    .into()
}

/// What was refused, and what was lacking, while so many bytes were live.
fn refusal(oom: &RecordedOom, live: u64) -> String {
    let RecordedOom { bytes, held_bytes, device_free_bytes, .. } = *oom;
    let cached = Bytes(held_bytes.saturating_sub(live));
    let on_device =
        device_free_bytes.map_or_else(String::new, |free| format!(", and {} free on the device", Bytes(free)));
    let on =
        oom.capacity_bytes().map_or_else(String::new, |bytes| format!(" on a device with {} for it", Bytes(bytes)));
    let lacks = match lacking(oom, live) {
        Some(0) => {
            "Enough was free, but not for this request: it was in pieces, rounded up, or of another pool or stream."
                .to_owned()
        }
        Some(lacks) => format!("{} were lacking, even with all that was free in one piece.", Bytes(lacks)),
        None => "What was free on the device was not recorded.".to_owned(),
    };
    format!(
        "The program was refused {}{on}: {} were live, {cached} free in the cache{on_device}. {lacks}",
        Bytes(bytes),
        Bytes(live)
    )
}

/// Where memory comes from.
fn place(program: &Program, profile: &Profile) -> String {
    let refused = program.recorded.oom().filter(|oom| oom.site.stack > 0);
    let refused = refused.map(|oom| format!("The refused request: {}.", headline(&program.labels, oom.site.stack)));
    let by = |by| {
        let grouping = profile.groups.iter().find(|grouping| grouping.by == by)?;
        let is_named = |name: &str| ![OTHERS, WITHOUT_STACK, WITHOUT_TAG].contains(&name);
        grouping.rows.iter().find(|group| group.peak_bytes > 0 && is_named(&group.name))
    };
    let largest = by("stack").map(|group| format!("What holds most: {}.", group.name));
    let tag =
        by("tag").map(|group| format!("Call stacks were not recorded. The tag with most memory is {}.", group.name));
    let found: Vec<String> = refused.into_iter().chain(largest.or(tag)).collect();
    match program.recorder {
        _ if !found.is_empty() => found.join(" "),
        Recorder::Aquifer => "Not recorded: give memory names with TagScope, or aquifer_tag in C.".to_owned(),
        Recorder::PyTorch => {
            "Not recorded: _record_memory_history() records call stacks unless stacks or context say otherwise."
                .to_owned()
        }
        _ => "Not recorded: only snapshots have call stacks and tags.".to_owned(),
    }
}

/// What the recording cannot say.
fn unknown(program: &Program) -> String {
    let recorded = &program.recorded;
    let missing = [
        (!program.has_history).then_some("the history: the peak, and what allocators would hold"),
        (program.has_history && recorded.begins_late)
            .then_some("what came before its history, so that figures are lower bounds"),
        (recorded.peak_held_bytes == 0).then_some("what the program's own allocator held"),
        recorded.oom().and_then(RecordedOom::capacity_bytes).is_none().then_some("the size of the device"),
        Some("other programs on the device, and the time of driver calls, which is modelled"),
    ];
    let missing = missing.into_iter().flatten().collect::<Vec<_>>().join("; ");
    format!("{}{}.", missing[..1].to_uppercase(), &missing[1..])
}

/// What replays say. `advice` has the best first.
pub fn of_replays(program: &Program, study: &Study, advice: &[Advice]) -> Vec<Answer> {
    let Some(usual) = study.usual() else { return Vec::new() };
    let at_least = if program.recorded.begins_late { "at least " } else { "" };
    let device = |case: &Case| {
        let size =
            case.smallest_device.map_or_else(|| "none".to_owned(), |bytes| format!("{at_least}{}", room_of(bytes)));
        format!("{size} with {}", case.manager.title())
    };
    let sizes = study.cases.iter().map(device).collect::<Vec<_>>().join("; ");
    let here = study.exhausted.as_ref().map(|exhausted| &exhausted.oom).filter(|oom| !oom.is_made_up);
    let here = here.map_or_else(String::new, |oom| match &oom.finishes_with[..] {
        [] => format!(" It finishes with none of them on {}.", Bytes(oom.device_bytes)),
        names => format!(" On {} it finishes with {}.", Bytes(oom.device_bytes), names.join("; ")),
    });
    let change = advice.first().map_or_else(
        || "Nothing that was tried helps.".to_owned(),
        |first| {
            let more = (advice.len() - 1) as u64;
            let more = if more > 0 {
                format!(" See also the {} of advice.", plural(more, "other piece"))
            } else {
                String::new()
            };
            let figures = first.figures.as_ref().map_or_else(String::new, |figures| {
                let needs = needs(figures.smallest_device_bytes, figures.smallest_device_bytes_before);
                let before = figures.peak_reserved_bytes_before;
                let held = before.map(|before| format!(" It holds {}.", instead(figures.peak_reserved_bytes, before)));
                format!(" {needs}{}", held.unwrap_or_default())
            });
            format!("{}.{figures}{more}", first.title)
        },
    );
    let ms = |us: f64| format!("{:.1} ms", us / 1e3);
    let cost = |with: &str, first: Option<f64>, later: Option<f64>| {
        let later = later.map_or_else(String::new, |later| format!(" and {} in each later one", ms(later)));
        first.map(|first| format!("{} in the first pass{later} with {with}", ms(first)))
    };
    let changed = advice.first().and_then(|first| first.figures.as_ref());
    let changed = changed
        .and_then(|figures| cost("that change", figures.driver_time_modelled_us, figures.warm_driver_time_modelled_us));
    let before = cost(&usual.manager.title(), usual.driver_us(), usual.sampled.later_us);
    let costs = before.into_iter().chain(changed).collect::<Vec<_>>().join("; ");
    let steps =
        program.events.iter().filter(|event| matches!(event, aquifer_trace::Event::Iteration(_))).count() as u64;
    let steps = if steps > 0 { format!(" A pass has {}.", plural(steps, "step")) } else { String::new() };
    let costs = match &*costs {
        "" => format!("Not known: {} refused a request.", usual.manager.title()),
        _ => format!("Driver calls take, as modelled, {costs}.{steps}"),
    };
    let card = |case: &Case| case.smallest_device.and_then(smallest_card);
    let named = |case: &Case| format!("{}, with {}", card(case).unwrap_or("No common card"), case.manager.title());
    let least =
        study.cases.iter().filter(|case| case.smallest_device.is_some()).min_by_key(|case| case.smallest_device);
    let cards = match least {
        Some(least) if card(least) != card(usual) => format!("{}; {}.", named(usual), named(least)),
        _ => format!("{}.", named(usual)),
    };
    [
        ("What fits", format!("The smallest device on which it finishes: {sizes}.{here}")),
        ("What to change", change),
        ("What a step costs", costs),
        ("Which card", cards),
    ]
    .map(|(question, answer)| Answer { question, answer })
    .into()
}
