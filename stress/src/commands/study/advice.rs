//! What wastes memory in a recorded program, and what would help: options, found by replaying the
//! program under them, and changes of the program, found in its events.

use std::collections::HashMap;

use serde::Serialize;

use super::{Case, Manager, Study, try_all};
use crate::exit::Failure;
use crate::input::{Event, Program, Site};
use crate::profile::{Profile, headline};
use crate::session::Session;
use crate::table::optional;
use crate::text::Bytes;

/// Options of PyTorch that are tried besides expandable segments.
const PYTORCH_OPTIONS: [&str; 6] = [
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "max_split_size_mb:64",
    "max_split_size_mb:256",
    "max_split_size_mb:1024",
];

/// Options of this project that trade memory for driver calls.
const OWN_OPTIONS: [&str; 3] = ["frame_mb:16", "frame_mb:64", "granule_mb:8,frame_mb:32"];

/// What must be saved for an option to be advised, in parts of the memory held: less is within what
/// a program's own variation brings.
const WORTH: u64 = 50;

/// A piece of advice.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Advice {
    pub title: String,
    pub text: String,
    /// Bytes saved at the peak, if that is known.
    pub saves: Option<u64>,
    /// The options to set, if any, and what the program takes and fits on with them.
    #[serde(flatten)]
    pub figures: Option<Figures>,
}

/// What a program takes with some options.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Figures {
    pub config: String,
    pub peak_reserved_bytes: u64,
    pub smallest_device_bytes: Option<u64>,
    pub driver_time_modelled_us: Option<f64>,
}

impl Figures {
    fn of(case: &Case) -> Figures {
        Figures {
            config: case.manager.config.text.clone(),
            peak_reserved_bytes: case.sampled.peak_reserved,
            smallest_device_bytes: case.smallest_device,
            driver_time_modelled_us: case.sampled.driver_us,
        }
    }
}

/// Looks for what would help a program.
///
/// # Errors
/// When an allocator fails for another reason than lack of memory.
pub fn advise(session: &Session, name: &str, program: &Program, study: &Study) -> Result<Vec<Advice>, Failure> {
    let Some(usual) = study.usual() else { return Ok(Vec::new()) };
    let pytorch = PYTORCH_OPTIONS.iter().filter_map(|options| Manager::pytorch(options, "PyTorch", options).ok());
    let own = OWN_OPTIONS.iter().filter_map(|options| Some(Manager::aquifer(options.parse().ok()?)));
    let tried = try_all(session, name, program, &study.profile, pytorch.chain(own).collect(), None)?;
    let others = study.cases.iter().skip(1).chain(&tried);
    let (own, pytorch): (Vec<&Case>, Vec<&Case>) = others.partition(|case| case.manager.name == "Aquifer");
    let mut advice = Vec::new();
    if let Some(best) = best(usual, &pytorch) {
        let title = format!("In PyTorch, set PYTORCH_ALLOC_CONF={}", best.manager.options);
        advice.push(Advice::option(title, best, usual));
    }
    if let Some(best) = best(usual, &own[..1.min(own.len())]) {
        advice.push(Advice::option("Use Aquifer".to_owned(), best, usual));
    }
    advice.extend(fewer_calls(&own));
    advice.extend(growing(program));
    advice.extend(outliving(program));
    advice.extend(separate_streams(program, &study.profile));
    advice.extend(many_sizes(program, &pytorch));
    Ok(advice)
}

impl Advice {
    fn option(title: String, case: &Case, usual: &Case) -> Advice {
        let on = |case: &Case| optional(case.smallest_device.map(Bytes));
        Advice {
            title,
            text: format!(
                "It takes {} instead of {}, and finishes on a device of {} instead of {}.",
                Bytes(case.sampled.peak_reserved),
                Bytes(usual.sampled.peak_reserved),
                on(case),
                on(usual)
            ),
            saves: usual.sampled.peak_reserved.checked_sub(case.sampled.peak_reserved),
            figures: Some(Figures::of(case)),
        }
    }

    fn of_code(title: String, text: String) -> Advice {
        Advice { title, text, saves: None, figures: None }
    }
}

/// Of the cases that finish on the smallest device or on one of 1 % more, the one that takes least,
/// if that saves enough to be worth a change.
fn best<'a>(usual: &Case, cases: &[&'a Case]) -> Option<&'a Case> {
    let device = |case: &Case| case.smallest_device.unwrap_or(u64::MAX);
    let is_less = |new: u64, old: u64| new < old && old - new >= old / WORTH;
    let is_worth = |case: &Case| {
        is_less(device(case), device(usual))
            || (device(case) <= device(usual) && is_less(case.sampled.peak_reserved, usual.sampled.peak_reserved))
    };
    let worth = || cases.iter().copied().filter(|case| is_worth(case));
    let smallest = worth().map(device).min()?;
    let near = worth().filter(|case| device(case) - smallest <= smallest / 100);
    near.min_by_key(|case| case.sampled.peak_reserved)
}

/// Driver time that matters, in microseconds.
const MATTERS_US: f64 = 20e3;

/// Options of this project that save a third of the driver's time for at most 1 % more memory.
fn fewer_calls(own: &[&Case]) -> Option<Advice> {
    let (usual, others) = own.split_first()?;
    let time = usual.sampled.driver_us.filter(|&us| us >= MATTERS_US)?;
    let is_worth = |case: &&&Case| {
        let most = usual.sampled.peak_reserved + usual.sampled.peak_reserved / 100;
        case.sampled.peak_reserved <= most && case.sampled.driver_us.is_some_and(|us| us <= time * 2.0 / 3.0)
    };
    let time_of = |case: &Case| case.sampled.driver_us.unwrap_or(f64::INFINITY);
    let best = others.iter().filter(is_worth).min_by(|one, other| time_of(one).total_cmp(&time_of(other)))?;
    Some(Advice {
        title: format!("With Aquifer, if driver calls matter, set AQUIFER_ALLOC_CONF={}", best.manager.options),
        text: format!(
            "Driver calls take {:.0} ms instead of {:.0} ms. It takes {} instead of {}.",
            time_of(best) / 1e3,
            time / 1e3,
            Bytes(best.sampled.peak_reserved),
            Bytes(usual.sampled.peak_reserved)
        ),
        saves: None,
        figures: Some(Figures::of(best)),
    })
}

/// The least size of a block that matters here.
const LARGE: u64 = 1 << 20;
/// Allocations between a block and the one that replaces it.
const NEAR: u64 = 8;
/// How often a block is replaced by a larger one before it is said to grow.
const STEPS: u32 = 8;

/// A live block, as far as growth is concerned.
#[derive(Clone, Copy, Default)]
struct Grown {
    bytes: u64,
    /// The number of its allocation.
    at: u64,
    /// How many smaller blocks it followed.
    steps: u32,
    site: Site,
    /// Whether a block that it replaces has been found.
    follows: bool,
}

/// Blocks that are replaced by slightly larger ones again and again, as when tensors are
/// concatenated in each step.
fn growing(program: &Program) -> Option<Advice> {
    let mut slots = vec![Grown::default(); program.slots as usize];
    let mut latest: Vec<u32> = Vec::new();
    let (mut sites, mut at) = (program.sites.iter(), 0);
    // By call stack and tag: replacements, bytes that were copied, and the largest block.
    let mut found: HashMap<(u32, u32), (u64, u64, u64)> = HashMap::new();
    for event in &program.events {
        match *event {
            Event::Alloc { slot, bytes, .. } => {
                at += 1;
                let site = sites.next().copied().unwrap_or_default();
                slots[slot as usize] = Grown { bytes, at, steps: 0, site, follows: false };
                if bytes >= LARGE {
                    latest.push(slot);
                }
            }
            Event::Free { slot } => {
                let old = std::mem::take(&mut slots[slot as usize]);
                if old.bytes < LARGE {
                    continue;
                }
                latest.retain(|&slot| slots[slot as usize].bytes > 0 && slots[slot as usize].at + NEAR > at);
                let replaces = |new: &Grown| {
                    new.at > old.at && !new.follows && new.bytes > old.bytes && new.bytes - old.bytes <= old.bytes / 4
                };
                let new = latest.iter().copied().filter(|&slot| replaces(&slots[slot as usize]));
                let Some(new) = new.min_by_key(|&slot| slots[slot as usize].bytes) else { continue };
                let new = &mut slots[new as usize];
                (new.steps, new.follows) = (old.steps + 1, true);
                if new.steps >= STEPS {
                    let steps = if new.steps == STEPS { u64::from(STEPS) } else { 1 };
                    let (count, copied, largest) = found.entry((new.site.stack, new.site.tag)).or_default();
                    (*count, *copied) = (*count + steps, *copied + steps * old.bytes);
                    *largest = new.bytes.max(*largest);
                }
            }
            _ => {}
        }
    }
    let (&(stack, _), &(count, copied, largest)) = found.iter().max_by_key(|&(key, &(_, copied, _))| (copied, key))?;
    let place = if stack == 0 { String::new() } else { format!(" at {}", headline(&program.labels, stack)) };
    Some(Advice::of_code(
        format!("Allocate arrays that grow once, at their final size{place}"),
        format!(
            "{count} times a block was replaced by one that is at most a quarter larger, up to {}: {} were copied, old              and new block were live together, and the old one fits no later request. A cache of the final size, or              memory that grows in place (`Growable` in Aquifer), avoids that.",
            Bytes(largest),
            Bytes(copied)
        ),
    ))
}

/// Blocks that are allocated in a step and freed in a later one, between blocks of the step.
fn outliving(program: &Program) -> Option<Advice> {
    let mut slots = vec![(0, 0, Site::default()); program.slots as usize];
    let (mut sites, mut iteration, mut iterations) = (program.sites.iter(), 0_u32, 0_u32);
    // By call stack and tag: blocks, bytes, and the longest life in iterations.
    let mut found: HashMap<(u32, u32), (u64, u64, u32)> = HashMap::new();
    let (mut blocks, mut bytes_in_all) = (0_u64, 0_u64);
    for event in &program.events {
        match *event {
            Event::Iteration(_) => {
                iteration += 1;
                iterations += 1;
            }
            Event::Alloc { slot, bytes, .. } => {
                slots[slot as usize] = (iteration, bytes, sites.next().copied().unwrap_or_default());
            }
            Event::Free { slot } => {
                let (begun, bytes, site) = slots[slot as usize];
                let lived = iteration - begun;
                // What begins before the first iteration is set up for all of them.
                if begun > 0 && lived > 0 && lived < iterations {
                    let (count, sum, longest) = found.entry((site.stack, site.tag)).or_default();
                    (*count, *sum, *longest) = (*count + 1, *sum + bytes, lived.max(*longest));
                    (blocks, bytes_in_all) = (blocks + 1, bytes_in_all + bytes);
                }
            }
            Event::RecordStream { .. } => {}
        }
    }
    if iterations < 4 || blocks * 2 < u64::from(iterations) {
        return None;
    }
    let (&(stack, _), &(count, bytes, longest)) = found.iter().max_by_key(|&(key, &(count, ..))| (count, key))?;
    let most = match stack {
        0 => String::new(),
        _ => format!(" Most of them, {count} of {}, come from {}.", Bytes(bytes), headline(&program.labels, stack)),
    };
    Some(Advice::of_code(
        "Free what a step allocates before the next step, or allocate it before the first".to_owned(),
        format!(
            "{blocks} blocks of {} live on into later iterations, up to {longest} of them, among blocks of their own              iteration. Where segments do not move, each of them keeps a segment from being used for a larger              request.{most}",
            Bytes(bytes_in_all)
        ),
    ))
}

/// Streams whose peaks are at different times: caches that are not shared hold the sum.
fn separate_streams(program: &Program, profile: &Profile) -> Option<Advice> {
    let mut live = vec![(0_u64, 0_u64); program.streams.len()];
    let mut slots = vec![(0, 0); program.slots as usize];
    for event in &program.events {
        match *event {
            Event::Alloc { slot, bytes, stream } => {
                slots[slot as usize] = (stream, bytes);
                let (now, most) = &mut live[usize::from(stream)];
                *now += bytes;
                *most = (*most).max(*now);
            }
            Event::Free { slot } => {
                let (stream, bytes) = slots[slot as usize];
                live[usize::from(stream)].0 -= bytes;
            }
            _ => {}
        }
    }
    let sum: u64 = live.iter().map(|&(_, most)| most).fold(0, u64::saturating_add);
    let used = live.iter().filter(|&&(_, most)| most >= LARGE).count();
    (used > 1 && sum > profile.peak.bytes + profile.peak.bytes / 10).then(|| {
        Advice::of_code(
            format!("Let fewer streams allocate: {used} do"),
            format!(
                "They use most at different times: their peaks add up to {}, and the program's own peak is {}.                  PyTorch never gives a stream's free memory to another, so its cache holds at least the sum. Allocate                  on one stream and use `record_stream`, or use an allocator whose streams share memory.",
                Bytes(sum),
                Bytes(profile.peak.bytes)
            ),
        )
    })
}

/// Sizes that hardly repeat, of which each needs a place of its own.
fn many_sizes(program: &Program, pytorch: &[&Case]) -> Option<Advice> {
    let mut counts: HashMap<u64, u64> = HashMap::new();
    for event in &program.events {
        if let Event::Alloc { bytes: bytes @ LARGE.., .. } = *event {
            *counts.entry(bytes).or_default() += 1;
        }
    }
    let (sizes, allocs) = (counts.len() as u64, counts.values().sum::<u64>());
    if sizes < 100 || sizes * 20 < allocs {
        return None;
    }
    let rounded = pytorch.iter().filter(|case| case.manager.options.starts_with("roundup_power2_divisions"));
    let rounded = rounded.filter_map(|case| Some((case.smallest_device?, *case))).min_by_key(|&(device, _)| device);
    let evidence = rounded.map_or_else(String::new, |(device, case)| {
        format!(
            " As a measure of what that brings: with all sizes rounded in the allocator ({}), PyTorch takes {} and              finishes on {}.",
            case.manager.options,
            Bytes(case.sampled.peak_reserved),
            Bytes(device)
        )
    });
    Some(Advice::of_code(
        "Pad lengths to a few sizes".to_owned(),
        format!(
            "{allocs} blocks of 1 MiB and more have {sizes} different sizes, so a freed block rarely fits the next              request.{evidence}"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::super::sampled::sample;
    use super::*;
    use crate::cli::Global;
    use crate::input;

    fn advice(text: &str) -> Vec<Advice> {
        let program = &input::read("p.trace".as_ref(), text.as_bytes()).unwrap()[0];
        let session =
            Session::new(&Global { device: Some("sim:64GiB".parse().unwrap()), ..Global::default() }).unwrap();
        let session = session.unchecked();
        let study = Study::of(&session, "p", program, 0).unwrap();
        advise(&session, "p", program, &study).unwrap()
    }

    fn titles(advice: &[Advice]) -> String {
        advice.iter().map(|advice| format!("{}\n{}\n", advice.title, advice.text)).collect()
    }

    #[test]
    fn arrays_that_grow_are_found() {
        let mut text = String::from("a 0 4194304 0\n");
        for step in 1..100_u64 {
            text += &format!("a {step} {} 0\nf {} 0\n", (4 << 20) + step * 100_000, step - 1);
        }
        let found = titles(&advice(&text));
        assert!(found.contains("Allocate arrays that grow once"), "{found}");
        assert!(found.contains("99 times a block was replaced"), "{found}");
        let same: String = (0..100).map(|id| format!("a {id} 4194304 0\nf {id} 0\n")).collect();
        assert!(!titles(&advice(&same)).contains("grow"), "nothing grows");
    }

    #[test]
    fn blocks_that_outlive_their_step_are_found() {
        let mut text = String::new();
        for step in 0..20 {
            text += &format!("i {step}\na {step}0 8388608 0\na {step}1 1000 0\nf {step}0 0\n");
            if step > 0 {
                text += &format!("f {}1 0\n", step - 1);
            }
        }
        let found = titles(&advice(&text));
        assert!(found.contains("Free what a step allocates"), "{found}");
        assert!(found.contains("19 blocks of 18.55 KiB live on"), "{found}");
    }

    #[test]
    fn streams_that_take_turns_are_found() {
        let text: String = (0..8).map(|id| format!("a {id} 41943040 {id}\nf {id} {id}\n")).collect();
        let found = titles(&advice(&text));
        assert!(found.contains("Let fewer streams allocate: 8 do"), "{found}");
        assert!(found.contains("add up to 320.00 MiB, and the program's own peak is 40.00 MiB"), "{found}");
        assert!(found.contains("Use Aquifer"), "{found}");
    }

    #[test]
    fn advised_options_bring_the_figures_that_are_named() {
        let mut text = String::new();
        for id in 0..300_u64 {
            text += &format!("a {id} {} 0\na {id}9999 600000 0\n", (2 << 20) + id * 70_000);
            if id > 3 {
                text += &format!("f {} 0\n", id - 3);
            }
        }
        let advice = advice(&text);
        let option = advice.iter().find(|advice| advice.title.starts_with("In PyTorch")).unwrap();
        let figures = option.figures.as_ref().unwrap();
        let program = &input::read("p.trace".as_ref(), text.as_bytes()).unwrap()[0];
        let session =
            Session::new(&Global { device: Some("sim:64GiB".parse().unwrap()), ..Global::default() }).unwrap();
        let config = figures.config.parse().unwrap();
        let profile = Profile::of(program);
        let sampled = sample(&session, program, &config, &profile.buckets, None).unwrap();
        assert_eq!(sampled.peak_reserved, figures.peak_reserved_bytes);
        assert!(option.text.contains(&Bytes(sampled.peak_reserved).to_string()), "{}", option.text);
    }
}
