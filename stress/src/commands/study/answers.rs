//! Answers to what a newcomer asks, each in one line: first what the recording says, then what
//! replays say.

use aquifer_trace::input::{Event, Program, RecordedOom, Recorder, Site};
use aquifer_trace::profile::{Grouping, OTHERS, Profile};
use aquifer_trace::{WITHOUT_STACK, WITHOUT_TAG, headline};

use super::rows::{Advice, Answer};
use super::{Asked, Case, Study};
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

/// Sentences about the groups that hold most at the profile's moment: by call stack and by tag, or
/// else by size.
pub fn held_by(profile: &Profile) -> String {
    let is_place = |grouping: &&Grouping| ["stack", "tag"].contains(&grouping.by);
    let (places, others): (Vec<_>, Vec<_>) = profile.groups.iter().partition(is_place);
    let by = |grouping: &&Grouping| {
        let mut live: Vec<_> =
            grouping.rows.iter().filter(|group| group.peak_bytes > 0 && group.name != OTHERS).collect();
        live.sort_by_key(|group| std::cmp::Reverse(group.peak_bytes));
        let named = live.iter().take(NAMED).map(|group| match (grouping.by, Bytes(group.peak_bytes)) {
            ("size", bytes) => format!("{bytes} in blocks of {}", group.name),
            (_, bytes) => format!("{} {bytes}", group.name),
        });
        let named = named.collect::<Vec<_>>().join("; ");
        let numbers =
            if grouping.has_numbers() { " The program itself names memory by numbers, as of its steps." } else { "" };
        (!live.is_empty()).then(|| format!("By {}: {named}.{numbers}", grouping.title.to_lowercase()))
    };
    let said = if places.is_empty() { others.iter().take(1) } else { places.iter().take(2) };
    let said = said.filter_map(by).collect::<Vec<_>>();
    if said.is_empty() { "Nothing was live.".to_owned() } else { said.join(" ") }
}

/// Says that a program that has `peak` bytes live at once is too large for a device.
pub fn too_large(peak: u64, device_bytes: u64) -> Option<String> {
    let more = peak.checked_sub(device_bytes).filter(|&more| more > 0)?;
    let [peak, more, size] = [peak, more, device_bytes].map(Bytes);
    Some(format!("{peak} are live at once, {more} more than the device of {size} has"))
}

/// The first line: what the program used, or what it was refused.
pub fn headline_of(program: &Program, profile: &Profile, asked: Option<&Asked>) -> String {
    let (peak, recorded) = (Bytes(profile.peak.bytes), &program.recorded);
    let refused = |oom: &RecordedOom| {
        let on = oom.capacity_bytes().map_or_else(String::new, |bytes| format!(" on {}", Bytes(bytes)));
        format!("refused {}{on}", Bytes(oom.bytes))
    };
    let finishes = asked.filter(|asked| asked.finishes().is_some());
    let finishes = finishes.map(|asked| format!(", and finishes on {}", Bytes(asked.device_bytes)));
    let said = match (asked.and_then(|asked| asked.refused.as_ref()), recorded.oom()) {
        (Some(oom), _) => format!("is {}", refused(oom)),
        (None, Some(oom)) => format!("was {}", refused(oom)),
        _ if !program.has_history => format!("had {peak} live when the snapshot was taken"),
        _ if recorded.begins_late => format!("uses at least {peak}"),
        _ => format!("uses at most {peak}"),
    };
    said + &finishes.unwrap_or_default()
}

/// What the recording says, and what becomes of the program on the device that the user named.
pub fn of_recording(program: &Program, profile: &Profile, asked: Option<&Asked>) -> Vec<Answer> {
    let (recorded, moment) = (&program.recorded, profile.moment);
    let live = moment.bytes;
    let refused = asked.and_then(|asked| asked.refused.as_ref());
    let said = match recorded.oom() {
        // Groups are compared at another moment then.
        Some(oom) if refused.is_some() => format!("In the recording, the program was refused {}.", Bytes(oom.bytes)),
        Some(oom) => format!("In the recording, {}", refusal(oom, live)),
        None if program.has_history => "In the recording, no request was refused.".to_owned(),
        None => "Whether a request was refused is not recorded.".to_owned(),
    };
    let mut what = match asked {
        None => said,
        Some(Asked { device_bytes, manager, .. }) => {
            let with =
                manager.as_ref().map_or_else(String::new, |manager| format!("As replayed with {}, ", manager.title()));
            let here = match refused {
                Some(oom) => with + &refusal(oom, live),
                None if manager.is_some() => format!("{with}nothing on a device of {}.", Bytes(*device_bytes)),
                None => String::new(),
            };
            let too_large = too_large(profile.peak.bytes, *device_bytes).map_or_else(String::new, |text| text + ".");
            [here, too_large, said].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ")
        }
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
    let (event, events) = (moment.event, profile.buckets.events);
    let when = match (refused, recorded.oom()) {
        (Some(oom), _) => format!("At event {} of {events}{iteration}.", oom.event),
        (_, oom) if !program.has_history => {
            let when = if oom.is_some() { "At the refusal, when" } else { "When" };
            format!("{when} the snapshot was taken: what came before is not known.")
        }
        (_, Some(oom)) if oom.is_last => format!("At its last request, event {event}{iteration}."),
        (_, Some(_)) => format!("At event {event} of {events}{iteration}."),
        (_, None) => format!("Most is in use after event {event} of {events}{iteration}."),
    };
    let least = if recorded.begins_late && program.has_history { "At least " } else { "" };
    let held = format!("{least}{} in {}. {}", Bytes(live), plural(moment.blocks, "block"), held_by(profile));
    [
        ("What ran out", what),
        ("When", when),
        ("Who held it", held),
        ("Where in the code", place(program, profile, refused.or(recorded.oom()))),
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
        "the program was refused {}{on}: {} were live, {cached} free in the cache{on_device}. {lacks}",
        Bytes(bytes),
        Bytes(live)
    )
}

/// Where memory comes from, and the refused request.
fn place(program: &Program, profile: &Profile, oom: Option<&RecordedOom>) -> String {
    let Site { stack, tag } = oom.map_or(Site::default(), |oom| oom.site);
    let tag = program.labels.text(tag);
    let refused = match ((stack > 0).then(|| headline(&program.labels, stack)), tag) {
        (Some(place), Some(tag)) => Some(format!("The refused request: {place}, with the tag {tag}.")),
        (Some(place), None) => Some(format!("The refused request: {place}.")),
        (None, Some(tag)) => Some(format!("The refused request has the tag {tag}.")),
        (None, None) => None,
    };
    let by = |by| {
        let grouping = profile.groups.iter().find(|grouping| grouping.by == by)?;
        let is_named = |name: &str| ![OTHERS, WITHOUT_STACK, WITHOUT_TAG].contains(&name);
        grouping.rows.iter().find(|group| group.peak_bytes > 0 && is_named(&group.name))
    };
    let largest = by("stack").map(|group| format!("What holds most: {}.", group.name));
    let tag = by("tag").map(|group| format!("The tag with most memory is {}.", group.name));
    let without = (stack == 0 && largest.is_none()).then(|| "Call stacks were not recorded.".to_owned());
    let found: Vec<String> = refused.into_iter().chain(largest.or(tag)).collect();
    let found: Vec<String> = without.into_iter().filter(|_| !found.is_empty()).chain(found.clone()).collect();
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

/// A sentence about the smallest device.
pub(super) fn needs(with: Option<u64>, before: Option<u64>) -> String {
    match (with, before) {
        (Some(new), Some(old)) => format!("The smallest device has {}.", instead(new, old)),
        (Some(new), None) => format!("The smallest device has {}; before, no device had enough.", Bytes(new)),
        (None, _) => "No device has enough.".to_owned(),
    }
}

/// Two sizes, in GiB if one of them is and the other is no small part of that.
pub(super) fn instead(new: u64, old: u64) -> String {
    let are_of_gib = (1 << 30..1 << 40).contains(&new.max(old)) && new.min(old) >= 100 << 20;
    #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
    let in_gib = |bytes: u64| format!("{:.2}", bytes as f64 / f64::from(1 << 30));
    let unit = if are_of_gib { " GiB" } else { "" };
    let [new, old] = [new, old].map(|bytes| if are_of_gib { in_gib(bytes) } else { Bytes(bytes).to_string() });
    if new == old { format!("{new}{unit} as before") } else { format!("{new} instead of {old}{unit}") }
}

/// A time of driver calls, in microseconds.
fn driver_ms(us: f64) -> String {
    match us / 1e3 {
        0.0 => "0 ms".to_owned(),
        ms if ms < 0.1 => "less than 0.1 ms".to_owned(),
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.0} ms"),
    }
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
    let need = |case: &Case| (case.manager.title(), case.smallest_device);
    let needs: Vec<_> = study.cases.iter().map(need).collect();
    let here = study.exhausted.as_ref().map(|exhausted| &exhausted.oom).filter(|oom| !oom.is_made_up);
    let here = here.map_or_else(String::new, |oom| match &oom.finishes_with[..] {
        [] => format!(" It finishes with none of them on {}.", Bytes(oom.device_bytes)),
        names => format!(" On {} it finishes with {}.", Bytes(oom.device_bytes), names.join("; ")),
    });
    [
        ("What fits", format!("The smallest device on which it finishes: {sizes}.{here}")),
        ("What to change", change(study, advice)),
        ("What a step costs", costs(program, study, usual, advice)),
        ("Which card", cards(need(usual), &needs)),
    ]
    .map(|(question, answer)| Answer { question, answer })
    .into()
}

/// What to change so that the program finishes, or else what helps most.
fn change(study: &Study, advice: &[Advice]) -> String {
    let more = |said: usize, other: &str| match advice.len().saturating_sub(said) {
        0 => String::new(),
        1 => format!(" `advise` has one {other}piece of advice."),
        more => format!(" `advise` has {more} {other}pieces of advice."),
    };
    if let Some(asked) = &study.asked
        && let Some(manager) = asked.finishes()
    {
        let size = Bytes(asked.device_bytes);
        return format!("Nothing: it finishes on {size} with {}.{}", manager.title(), more(0, ""));
    }
    let Some(first) = advice.first() else { return "Nothing that was tried helps.".to_owned() };
    let figures = first.figures.as_ref().map_or_else(String::new, |figures| {
        let needs = needs(figures.smallest_device_bytes, figures.smallest_device_bytes_before);
        let before = figures.peak_reserved_bytes_before;
        let held = before.map(|before| format!(" It holds {}.", instead(figures.peak_reserved_bytes, before)));
        format!(" {needs}{}", held.unwrap_or_default())
    });
    format!("{}.{figures}{}", first.title, more(1, "other "))
}

/// The time of driver calls, with the usual allocator and with what is advised.
fn costs(program: &Program, study: &Study, usual: &Case, advice: &[Advice]) -> String {
    let steps = program.events.iter().filter(|event| matches!(event, Event::Iteration(_))).count() as u64;
    let cost = |with: &str, first: Option<f64>, later: Option<f64>| {
        #[expect(clippy::cast_precision_loss, reason = "a share is shown")]
        let each =
            |us: f64| if steps > 1 { format!(" ({} a step)", driver_ms(us / steps as f64)) } else { String::new() };
        let later = later
            .map_or_else(String::new, |later| format!(" and {} in each later one{}", driver_ms(later), each(later)));
        first.map(|first| format!("{} in the first pass{later} with {with}", driver_ms(first)))
    };
    let changed = advice.first().and_then(|first| first.figures.as_ref());
    let changed = changed.and_then(|figures| {
        cost(&figures.title, figures.driver_time_modelled_us, figures.warm_driver_time_modelled_us)
    });
    let before = cost(&usual.manager.title(), usual.driver_us(), usual.sampled.later_us);
    let said = before.into_iter().chain(changed).collect::<Vec<_>>().join("; ");
    if said.is_empty() {
        return format!("Not known: {} refused a request.", usual.manager.title());
    }
    let pass = match steps {
        0 => "A pass is one run of the recording, which does not tell where steps begin.".to_owned(),
        steps => format!("A pass is one run of the recording, of {}.", plural(steps, "step")),
    };
    format!("Driver calls take, as modelled on {}: {said}. {pass}", study.tried_on)
}

/// The smallest common card with the usual allocator, and with the first that needs a smaller: of
/// each, its title and the smallest device on which the program finishes.
fn cards(usual: (String, Option<u64>), all: &[(String, Option<u64>)]) -> String {
    let card = |device: Option<u64>| device.and_then(smallest_card);
    let named = |(title, device): &(String, _)| format!("{}, with {title}", card(*device).unwrap_or("No common card"));
    let least = card(all.iter().filter_map(|&(_, device)| device).min());
    match all.iter().find(|&&(_, device)| card(device) == least) {
        Some(first) if least != card(usual.1) => format!("{}; {}.", named(&usual), named(first)),
        _ => format!("{}.", named(&usual)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let shown = [0.0, 99.0, 740.0, 9960.0, 23_600.0].map(driver_ms);
        assert_eq!(shown, ["0 ms", "less than 0.1 ms", "0.7 ms", "10.0 ms", "24 ms"]);
    }

    #[test]
    fn the_card_is_that_of_the_first_allocator_that_needs_so_small_a_one() {
        let need = |title: &str, gib: u64| (title.to_owned(), Some(gib << 30));
        let all = [need("PyTorch", 9), need("expandable", 7), need("Aquifer", 6)];
        let said = cards(all[0].clone(), &all);
        assert_eq!(said.split_once("; ").unwrap().1, "RTX 4060 (8 GB), with expandable.");
        assert_eq!(cards(all[1].clone(), &all[1..]), "RTX 4060 (8 GB), with expandable.");
        let none = ("PyTorch".to_owned(), None);
        assert_eq!(cards(none.clone(), std::slice::from_ref(&none)), "No common card, with PyTorch.");
        assert_eq!(cards(none, &all[2..]), "No common card, with PyTorch; RTX 4060 (8 GB), with Aquifer.");
    }
}
