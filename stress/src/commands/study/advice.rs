//! What wastes memory in a recorded program, and what would help: options, found by replaying the
//! program under them, and changes of the program, found in its events.

use std::collections::HashMap;

use super::answers::{held_by, instead, lacking, needs, room_of};
use super::graph_pools::graph_pools;
use super::rows::{Advice, Figures};
use super::{Case, Exhausted, Manager, SPLITTING, Study, roomy, try_all};
use aquifer_trace::headline;
use aquifer_trace::input::{Event, Program, Recorder, Site};
use aquifer_trace::profile::Profile;

use crate::cli::ConfigArg;
use crate::session::Session;
use crate::text::{Bytes, plural};

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

/// What must be saved for advice, in parts of the memory held: 2 %. Less is within what a program's
/// own variation brings.
const WORTH: u64 = 50;

/// Driver time that matters, and the least that is shown, in microseconds.
const MATTERS_US: f64 = 20e3;
const SHOWN_US: f64 = 1e3;

fn figures(case: &Case, before: &Case) -> Option<Figures> {
    Some(Figures {
        title: case.manager.title(),
        config: case.manager.config.text.clone(),
        options: case.manager.options.clone(),
        peak_reserved_bytes: case.sampled.peak_reserved,
        peak_reserved_bytes_before: before.holds(),
        smallest_device_bytes: case.smallest_device,
        smallest_device_bytes_before: before.smallest_device,
        driver_time_modelled_us: case.driver_us(),
        driver_time_modelled_us_before: before.driver_us(),
        warm_driver_time_modelled_us: case.sampled.later_us,
        warm_driver_time_modelled_us_before: before.sampled.later_us,
    })
}

/// Looks for what would help a program, compared with the study's usual case. Options that cannot
/// be tried are reported.
pub fn advise(session: &Session, name: &str, program: &Program, study: &Study) -> Vec<Advice> {
    let Some(usual) = study.usual() else { return graph_pools(program) };
    // What PyTorch's options would do says nothing about a program on another allocator.
    let is_pytorch = matches!(program.recorder, Recorder::PyTorch | Recorder::Unknown);
    let pytorch = PYTORCH_OPTIONS.iter().filter(|_| is_pytorch);
    let pytorch =
        pytorch.filter_map(|options| Manager::pytorch(options, &format!("PyTorch with {options}"), options).ok());
    // They would replace the user's options.
    let is_default = study.own().is_some_and(|own| own.manager.options.is_empty());
    let own = OWN_OPTIONS.iter().filter(|_| is_default);
    let own = own.filter_map(|options| Some(Manager::asked(options.parse::<ConfigArg>().ok()?.trial())));
    let mut tried = Vec::new();
    let managers = pytorch.chain(own).collect();
    for one in try_all(session, &roomy(session, program), program, &study.profile, managers, None) {
        match one {
            Ok(case) => tried.push(case),
            Err((who, failure)) => session.message(format_args!("note: {name}: {who} is left out: {failure}")),
        }
    }
    let (pytorch, own): (Vec<&Case>, Vec<&Case>) = tried.iter().partition(|case| case.manager.is_pytorch);
    let pytorch: Vec<&Case> = study.cases.iter().filter(|case| case.manager.is_pytorch).chain(pytorch).collect();
    let mut advice: Vec<Advice> = free_some(program, study).into_iter().collect();
    let in_pytorch = best(usual, &pytorch).filter(|_| is_pytorch);
    if let Some(best) = in_pytorch {
        let (title, mut how) = match &*best.manager.options {
            "" => ("In PyTorch, unset PYTORCH_ALLOC_CONF".to_owned(), String::new()),
            options => (
                format!("In PyTorch, set PYTORCH_ALLOC_CONF={options}"),
                " Older versions read PYTORCH_CUDA_ALLOC_CONF.".to_owned(),
            ),
        };
        if usual.manager.is_recorded {
            how += &format!(" This replaces {}.", usual.manager.options);
        }
        advice.push(option(title, &how, best, usual));
    }
    let both: Vec<&Case> = study.own().into_iter().chain(study.splitting()).collect();
    if let Some(best) = best(usual, &both) {
        let options = match &*best.manager.options {
            "" => String::new(),
            options => format!(" with AQUIFER_ALLOC_CONF={options}"),
        };
        let mut how = String::new();
        if is_pytorch {
            how += " In PyTorch: `import aquifer_torch; aquifer_torch.enable()`.";
        }
        if best.manager.splits() {
            how += &format!(" {SPLITTING}");
        }
        advice.push(option(format!("Use Aquifer{options}"), &how, best, usual));
    }
    advice.extend(study.own().and_then(|usual| fewer_calls(usual, &own)));
    advice.extend(growing(program));
    // Where options remove the waste, the program need not change.
    let left = in_pytorch.unwrap_or(usual).holds();
    if left.is_none_or(|left| left.saturating_sub(study.profile.peak.bytes) >= left / WORTH) {
        advice.extend(outliving(program));
    }
    advice.extend(separate_streams(program, &study.profile));
    advice.extend(many_sizes(program, usual, &pytorch).filter(|_| is_pytorch).into_iter().chain(graph_pools(program)));
    advice
}

/// Options with which a program finishes. `how` is a sentence about them, or empty.
fn option(title: String, how: &str, case: &Case, usual: &Case) -> Advice {
    let most = match (case.holds(), usual.holds()) {
        (Some(new), Some(old)) => format!(" It holds {}.", instead(new, old)),
        _ => " With it the program finishes on this device.".to_owned(),
    };
    let time = driver_time(case, usual).map_or_else(String::new, |time| format!(" {time}"));
    let text = format!("{}{most}{time}{how}", needs(case.smallest_device, usual.smallest_device));
    let saves = case.holds().zip(usual.holds()).and_then(|(new, old)| old.checked_sub(new));
    Advice { title, text, saves, figures: figures(case, usual) }
}

fn of_code(title: String, text: String) -> Advice {
    Advice { title, text, saves: None, figures: None }
}

/// A sentence about the time of driver calls, unless it is too short to matter.
fn driver_time(case: &Case, usual: &Case) -> Option<String> {
    let (new, old) = (case.driver_us()?, usual.driver_us());
    let shown = new.max(old.unwrap_or(0.0)) >= SHOWN_US;
    let instead = |old: Option<f64>| old.map_or_else(String::new, |old| format!(" instead of {:.0}", old / 1e3));
    let later = case.sampled.later_us.map_or_else(String::new, |later| {
        format!(" in the first pass, and {:.0}{} ms in each later one", later / 1e3, instead(usual.sampled.later_us))
    });
    shown.then(|| format!("Driver calls take {:.0}{} ms{later}, as modelled.", new / 1e3, instead(old)))
}

/// What a program that is too large for its device has to free, if there is a device.
fn free_some(program: &Program, study: &Study) -> Option<Advice> {
    let oom = program.recorded.oom().filter(|_| study.asked.is_none());
    let (on, lacks, before) = match (oom, &study.exhausted) {
        (Some(oom), _) => (oom.capacity_bytes()?, lacking(oom, study.profile.moment.bytes)?, Some(oom.bytes)),
        (None, Some(Exhausted { oom, .. })) => {
            (oom.device_bytes, study.profile.peak.bytes.checked_sub(oom.device_bytes)?, None)
        }
        (None, None) => return None,
    };
    let before = before.map_or_else(String::new, |bytes| format!(" before it asks for {}", Bytes(bytes)));
    let lacks = Bytes(lacks);
    let device = study.usual().and_then(|usual| {
        let size = usual.smallest_device.filter(|&size| size > on).map(room_of)?;
        Some(format!(", or use a device of {size} with {}", usual.manager.title()))
    });
    let device = device.unwrap_or_default();
    (lacks.0 > 0).then(|| {
        of_code(
            format!("Free at least {lacks}{before}{device}"),
            format!("No option of an allocator helps: more is live at once than there is. {}", held_by(&study.profile)),
        )
    })
}

/// Of the cases that finish, on the smallest device or on one of 1 % more, the one that takes
/// least, if that saves enough to be worth a change, or the usual one does not finish.
fn best<'a>(usual: &Case, cases: &[&'a Case]) -> Option<&'a Case> {
    let device = |case: &Case| case.smallest_device.unwrap_or(u64::MAX);
    let is_less = |new: u64, old: u64| new < old && old - new >= old / WORTH;
    // Only runs in which every request was served are compared.
    let is_worth = |case: &Case| match (case.holds(), usual.holds()) {
        (None, _) => false,
        (Some(_), None) => true,
        (Some(new), Some(old)) => {
            is_less(device(case), device(usual)) || (device(case) <= device(usual) && is_less(new, old))
        }
    };
    let worth = || cases.iter().copied().filter(|case| is_worth(case));
    let smallest = worth().map(device).min()?;
    let near = worth().filter(|case| device(case) - smallest <= smallest / 100);
    near.min_by_key(|case| case.holds())
}

/// Options of this project that save a third of the driver's time for at most 1 % more memory.
fn fewer_calls(usual: &Case, others: &[&Case]) -> Option<Advice> {
    // A pass after the first is as costly as all that follow.
    let time_of =
        |case: &Case| case.driver_us().zip(case.sampled.later_us).map_or(f64::INFINITY, |(first, later)| first + later);
    let time = Some(time_of(usual)).filter(|us| (MATTERS_US..f64::INFINITY).contains(us))?;
    let before = usual.holds()?;
    let is_worth = |case: &&&Case| {
        case.holds().is_some_and(|held| held <= before + before / 100) && time_of(case) <= time * 2.0 / 3.0
    };
    let best = others.iter().filter(is_worth).min_by(|one, other| time_of(one).total_cmp(&time_of(other)))?;
    Some(Advice {
        title: format!("With Aquifer, if driver calls matter, set AQUIFER_ALLOC_CONF={}", best.manager.options),
        text: format!(
            "{} It holds {}. {}",
            driver_time(best, usual)?,
            instead(best.holds()?, before),
            needs(best.smallest_device, usual.smallest_device)
        ),
        saves: None,
        figures: figures(best, usual),
    })
}

/// The least size of a block that matters here. Smaller ones are kept apart from larger ones.
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
                    *count += steps;
                    *copied = copied.saturating_add(old.bytes.saturating_mul(steps));
                    *largest = new.bytes.max(*largest);
                }
            }
            _ => {}
        }
    }
    let (&(stack, _), &(count, copied, largest)) = found.iter().max_by_key(|&(key, &(_, copied, _))| (copied, key))?;
    let place = if stack == 0 { String::new() } else { format!(" at {}", headline(&program.labels, stack)) };
    Some(of_code(
        format!("Allocate arrays that grow once, at their final size{place}"),
        format!(
            "{count} times a block was replaced by one that is at most a quarter larger, up to {}. {} were copied, and \
             old and new block were live together. A cache of the final size, or memory that grows in place \
             (`Growable` in Aquifer), avoids that.",
            Bytes(largest),
            Bytes(copied)
        ),
    ))
}

/// Large blocks that are allocated in an iteration and freed in one of the next, between blocks of
/// their own iteration. Those that live for most of the program, such as an optimizer's state, are
/// none.
fn outliving(program: &Program) -> Option<Advice> {
    let iterations = program.events.iter().filter(|event| matches!(event, Event::Iteration(_))).count();
    let mut slots = vec![(0, 0); program.slots as usize];
    let (mut iteration, mut blocks, mut bytes_in_all, mut longest) = (0, 0, 0_u64, 0);
    for event in &program.events {
        match *event {
            Event::Iteration(_) => iteration += 1,
            Event::Alloc { slot, bytes, .. } => slots[slot as usize] = (iteration, bytes),
            Event::Free { slot } => {
                let (begun, bytes) = slots[slot as usize];
                let lived = iteration - begun;
                if begun > 0 && lived > 0 && lived < iterations / 2 && iteration < iterations && bytes >= LARGE {
                    (blocks, longest) = (blocks + 1, longest.max(lived));
                    bytes_in_all = bytes_in_all.saturating_add(bytes);
                }
            }
            Event::RecordStream { .. } => {}
        }
    }
    (iterations >= 4 && blocks * 2 >= iterations).then(|| {
        of_code(
            "Where you can, free what an iteration allocates before the next, or allocate it before the first"
                .to_owned(),
            format!(
                "{blocks} blocks of at least 1 MiB ({} over the whole run) outlive the iteration that allocated them, \
                 by up to {}. Where memory does not move, such a block can keep what is free around it from serving \
                 a larger request.",
                Bytes(bytes_in_all),
                plural(longest as u64, "iteration")
            ),
        )
    })
}

/// Streams that use most memory at different times: caches that are not shared hold the sum.
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
    let peak = profile.peak.bytes;
    (used > 1 && sum > peak.saturating_add(peak / 10)).then(|| {
        of_code(
            format!("Let fewer streams allocate: {used} do"),
            format!(
                "They use most at different times: their peaks add up to {}, and the program's own peak is {}. \
                 PyTorch gives a stream's free memory to no other stream until memory runs out, so its cache grows to \
                 at least the sum. Allocate on one stream and use `record_stream`, or use an allocator whose streams \
                 share memory.",
                Bytes(sum),
                Bytes(peak)
            ),
        )
    })
}

/// Sizes that hardly repeat, of which each needs a place of its own, if rounding them helps.
fn many_sizes(program: &Program, usual: &Case, pytorch: &[&Case]) -> Option<Advice> {
    let mut counts: HashMap<u64, u64> = HashMap::new();
    for event in &program.events {
        if let Event::Alloc { bytes: bytes @ LARGE.., .. } = *event {
            *counts.entry(bytes).or_default() += 1;
        }
    }
    let (sizes, allocs) = (counts.len() as u64, counts.values().sum::<u64>());
    let (rounded, others): (Vec<&Case>, Vec<&Case>) =
        pytorch.iter().copied().partition(|case| case.manager.options.starts_with("roundup_power2_divisions"));
    let rounded = best(usual, &rounded)?;
    // An option that saves as much needs no change of the program.
    let device = |case: &Case| case.smallest_device.unwrap_or(u64::MAX);
    let is_as_good = |case: &&Case| {
        device(case) <= device(rounded) && case.holds().is_some_and(|held| Some(held) <= rounded.holds())
    };
    let less = match (rounded.holds(), usual.holds()) {
        (Some(new), Some(old)) => format!("PyTorch holds {}", instead(new, old)),
        _ => "PyTorch finishes on this device".to_owned(),
    };
    (sizes >= 100 && sizes * 20 >= allocs && !others.iter().any(is_as_good)).then(|| {
        of_code(
            "Pad lengths to a few sizes".to_owned(),
            format!(
                "{allocs} blocks of 1 MiB and more have {sizes} different sizes, so a freed block rarely fits the next \
                 request. If all sizes are rounded up ({}), {less}.",
                rounded.manager.options
            ),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::Asked;
    use super::super::sampled::sample;
    use super::*;
    use crate::cli::Global;
    use aquifer_trace::input;

    fn advice(text: &str) -> Vec<Advice> {
        let program = &input::read("p.trace".as_ref(), text.as_bytes()).unwrap()[0];
        let session =
            Session::new(&Global { device: Some("sim:64GiB".parse().unwrap()), ..Global::default() }).unwrap();
        let session = session.for_measuring();
        let study = Study::of(&session, "p", program, Asked::of(&session, program).unwrap(), 0).unwrap();
        advise(&session, "p", program, &study)
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
            text += &format!("i {step}\na {step}0 8388608 0\na {step}1 2097152 0\nf {step}0 0\n");
            if step > 0 {
                text += &format!("f {}1 0\n", step - 1);
            }
        }
        let found = titles(&advice(&text));
        assert!(found.contains("free what an iteration allocates"), "{found}");
        assert!(found.contains("18 blocks of at least 1 MiB (36.00 MiB over the whole run) outlive"), "{found}");
        assert!(found.contains("by up to 1 iteration."), "{found}");
        assert!(!found.contains("  "), "{found}");
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
        let before = figures.peak_reserved_bytes_before.unwrap();
        assert!(option.text.contains(&instead(sampled.peak_reserved, before)), "{}", option.text);
        assert!(option.title.ends_with(&format!("={}", figures.options)), "{}", option.title);
    }

    #[test]
    fn sizes_are_compared_in_one_unit() {
        assert_eq!(instead(1020 << 20, 1055 << 20), "1.00 instead of 1.03 GiB");
        assert_eq!(instead(12 << 20, 3 << 30), "12.00 MiB instead of 3.00 GiB");
        assert_eq!(instead(5 << 20, 6 << 20), "5.00 MiB instead of 6.00 MiB");
        assert_eq!(instead((3 << 30) + 1, 3 << 30), "3.00 GiB as before");
        assert_eq!(instead(1022 << 20, 1 << 30), "1.00 GiB as before");
        assert_eq!(instead(1 << 40, 2 << 40), "1.00 TiB instead of 2.00 TiB");
    }
}
