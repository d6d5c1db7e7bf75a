//! `explain`: what a recorded program uses memory for, what allocators make of it, why memory runs
//! out, and what helps.

use aquifer_trace::input::Program;
use aquifer_trace::profile::{Group, Grouping, OTHERS, Peak, Profile};
use aquifer_trace::{Figures, Map};
use serde::Serialize;

use crate::cards::smallest_card;
use crate::cli::ExplainArgs;
use crate::commands::advise::show;
use crate::commands::study::advice::{Advice, advise};
use crate::commands::study::{Case, Exhausted, SPLITTING, Study, more_than, tight};
use crate::commands::{jobs, on_simulator, ratio};
use crate::exit::{Failure, Outcome};
use crate::map::Style;
use crate::session::Session;
use crate::table::{number, optional, table};
use crate::text::{Bytes, plural, wrap};

/// Groups that are listed of each grouping.
const LISTED: usize = 8;

/// A program, as JSON. `explain --help` explains the fields.
#[derive(Debug, Serialize)]
struct Row<'a> {
    trace: &'a str,
    events: u64,
    streams: usize,
    peak_requested_bytes: u64,
    peak_event: u64,
    peak_blocks: u64,
    alive: Vec<Alive<'a>>,
    allocators: Vec<Allocator<'a>>,
    oom: Option<Oom>,
    /// `None` for programs that were not looked at in detail.
    advice: Option<&'a [Advice]>,
}

/// A group of blocks that are live at the peak.
#[derive(Debug, Serialize)]
struct Alive<'a> {
    by: &'a str,
    name: &'a str,
    detail: &'a str,
    bytes: u64,
    blocks: u64,
}

/// What an allocator makes of the program.
#[derive(Debug, Serialize)]
struct Allocator<'a> {
    name: &'a str,
    config: &'a str,
    peak_reserved_bytes: u64,
    reserved_over_requested: Option<f64>,
    smallest_device_bytes: Option<u64>,
    smallest_card: Option<&'static str>,
    ooms: usize,
    driver_calls: u64,
    driver_time_modelled_us: Option<f64>,
}

/// How the program runs out of memory with PyTorch's default options.
#[derive(Debug, Serialize)]
struct Oom {
    device_bytes: u64,
    is_made_up: bool,
    event: u64,
    requested_bytes: u64,
    free_bytes: u64,
    largest_free_bytes: u64,
    finishes_with: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// When standard output cannot be written.
pub fn run(session: &Session, args: &ExplainArgs) -> Result<Outcome, Failure> {
    let simulated = on_simulator(session, "explain")?;
    let session = simulated.as_ref().unwrap_or(session);
    let mut outcome = Outcome::Done;
    let printer = Printer { session, style: Style::of_stdout(args.ascii) };
    for programs in jobs(session, &args.files, &mut outcome, true) {
        let mut studies = Vec::new();
        for (name, program) in &programs {
            if program.peak_requested_bytes == 0 {
                session.show(format_args!("{name} never uses memory.\n"))?;
                continue;
            }
            let profile = Profile::of(program);
            if let [_] = &programs[..] {
                printer.usage(name, program, &profile)?;
                printer.recorded(program)?;
            }
            match Study::of(session, name, program, profile, 0) {
                Ok(study) => studies.push((&**name, program, study)),
                Err(failure) => {
                    outcome = outcome.max(failure.outcome());
                    session.message(format_args!("error: {name}: {failure}"));
                }
            }
        }
        printer.job(&studies, programs.len() > 1)?;
    }
    Ok(outcome)
}

fn row<'a>(name: &'a str, program: &Program, study: &'a Study, advice: Option<&'a [Advice]>) -> Row<'a> {
    let Peak { event, bytes, blocks, .. } = study.profile.peak;
    let alive = study.profile.groups.iter().flat_map(|grouping| {
        let live = grouping.rows.iter().filter(|group| group.peak_blocks > 0);
        live.map(|group| Alive {
            by: grouping.by,
            name: &group.name,
            detail: &group.detail,
            bytes: group.peak_bytes,
            blocks: group.peak_blocks,
        })
    });
    let allocator = |case: &'a Case| Allocator {
        name: &case.manager.name,
        config: &case.manager.config.text,
        peak_reserved_bytes: case.sampled.peak_reserved,
        reserved_over_requested: ratio(case.sampled.peak_reserved, bytes).filter(|_| case.finishes()),
        smallest_device_bytes: case.smallest_device,
        smallest_card: case.smallest_device.and_then(smallest_card),
        ooms: case.sampled.refused_at.len(),
        driver_calls: case.sampled.calls,
        driver_time_modelled_us: case.sampled.driver_us,
    };
    Row {
        trace: name,
        events: study.profile.buckets.events,
        streams: program.streams.len(),
        peak_requested_bytes: bytes,
        peak_event: event,
        peak_blocks: blocks,
        alive: alive.collect(),
        allocators: study.cases.iter().map(allocator).collect(),
        oom: study.exhausted.as_ref().map(|exhausted| oom(exhausted, study)),
        advice,
    }
}

fn oom(exhausted: &Exhausted, study: &Study) -> Oom {
    Oom {
        device_bytes: exhausted.device_bytes,
        is_made_up: exhausted.is_made_up,
        event: exhausted.refusal.event,
        requested_bytes: exhausted.refusal.refusal.bytes,
        free_bytes: exhausted.free(),
        largest_free_bytes: exhausted.largest_free(),
        finishes_with: study.finishing(exhausted).map(|case| case.manager.title()).collect(),
    }
}

/// Prints studies.
struct Printer<'a> {
    session: &'a Session,
    style: Style,
}

impl Printer<'_> {
    fn say(&self, text: &str) -> Result<(), Failure> {
        self.session.show(format_args!("{}\n", wrap(text, self.style.width)))
    }

    fn heading(&self, text: &str) -> Result<(), Failure> {
        let line = if self.style.ascii { "-" } else { "─" };
        self.session.show(format_args!("{text}\n{}", line.repeat(text.chars().count())))
    }

    /// Prints the programs of a file or folder, which are the ranks of a job: all in a table, and
    /// the one that needs most in detail. `with_usage` is false if what it uses was already
    /// printed.
    fn job(&self, studies: &[(&str, &Program, Study)], with_usage: bool) -> Result<(), Failure> {
        let needs = |study: &Study| {
            let smallest = study.usual().and_then(|case| case.smallest_device);
            (smallest.unwrap_or(u64::MAX), study.profile.peak.bytes)
        };
        let Some(most) = studies.iter().max_by_key(|(.., study)| needs(study)) else { return Ok(()) };
        if studies.len() > 1 {
            self.ranks(studies, most.0)?;
        }
        for job @ (name, program, study) in studies {
            let in_detail = std::ptr::eq(job, most);
            let advise_it = in_detail && program.has_history;
            let advice = advise_it.then(|| advise(self.session, name, program, study));
            self.session.row(&row(name, program, study, advice.as_deref()))?;
            if in_detail {
                if with_usage {
                    self.usage(name, program, &study.profile)?;
                    self.recorded(program)?;
                }
                self.detail(program, study, advice.as_deref().unwrap_or_default())?;
            }
        }
        Ok(())
    }

    fn ranks(&self, studies: &[(&str, &Program, Study)], most: &str) -> Result<(), Failure> {
        self.heading(&format!("{} programs, of which {most} needs most", studies.len()))?;
        let own = |study: &Study| study.own().and_then(|case| case.smallest_device);
        let rows: Vec<_> = studies.iter().map(|(name, _, study)| (*name, study, own(study))).collect();
        let table = table(
            &rows,
            1,
            &[
                ("program", |(name, ..)| (*name).to_owned()),
                ("requested", |(_, study, _)| Bytes(study.profile.peak.bytes).to_string()),
                ("PyTorch holds", |(_, study, _)| optional(study.usual().and_then(Case::holds).map(Bytes))),
                ("smallest device", |(_, study, _)| {
                    optional(study.usual().and_then(|case| case.smallest_device).map(Bytes))
                }),
                ("smallest device with Aquifer", |(.., smallest)| optional(smallest.map(Bytes))),
            ],
        );
        self.session.show(format_args!("{table}\n"))
    }

    fn detail(&self, program: &Program, study: &Study, advice: &[Advice]) -> Result<(), Failure> {
        if !program.has_history {
            return self.say(
                "The snapshot has no history, so nothing is known of the time before. Turn it on with \
                 torch.cuda.memory._record_memory_history() before the program allocates.",
            );
        }
        self.allocators(study)?;
        self.fragmentation(study)?;
        match &study.exhausted {
            Some(exhausted) => self.exhausted(study, exhausted)?,
            None => {
                let (who, size) = (study.usual().map_or("", |usual| &usual.manager.name), tight(program));
                let more = more_than(study.profile.peak.bytes, size);
                self.say(&format!("With {who} it finishes on a device of {}, {more} than it ever uses.", Bytes(size)))?;
            }
        }
        self.heading("What helps")?;
        show(self.session, study, advice)
    }

    fn usage(&self, name: &str, program: &Program, profile: &Profile) -> Result<(), Failure> {
        let Peak { event, bytes, blocks, iteration, .. } = profile.peak;
        let counting = if program.refused.is_some() { ", counting what it was refused" } else { "" };
        self.heading(&format!("{name} uses at most {}{counting}", Bytes(bytes)))?;
        let what = program.headers.iter().find(|(key, _)| key == "what");
        let what = what.map_or_else(String::new, |(_, value)| format!("It is {value}. "));
        let streams = plural(program.streams.len() as u64, "stream");
        let during =
            if profile.buckets.iteration.is_some() { format!(", in iteration {iteration}") } else { String::new() };
        self.say(&format!(
            "{what}The recording has {} on {streams}. Most is in use after event {event}{during}: {} in {}.",
            plural(profile.buckets.events, "event"),
            Bytes(bytes),
            plural(blocks, "block")
        ))?;
        if let Some(refused) = program.refused {
            self.say(&format!(
                "The recording ends with a refused request of {}. It counts as if it had been served, so that the \
                 figures are of a device on which the program goes on.",
                Bytes(refused)
            ))?;
        }
        self.session.show("Live then:")?;
        profile.groups.iter().try_for_each(|grouping| self.alive(grouping, bytes))
    }

    fn alive(&self, grouping: &Grouping, peak: u64) -> Result<(), Failure> {
        let is_listed = |group: &&Group| group.peak_blocks > 0 && group.name != OTHERS;
        let mut live: Vec<&Group> = grouping.rows.iter().filter(is_listed).collect();
        live.sort_by_key(|group| std::cmp::Reverse(group.peak_bytes));
        live.truncate(LISTED);
        let rest = peak - live.iter().map(|group| group.peak_bytes).sum::<u64>();
        let rows: Vec<(&Group, u64)> = live.into_iter().map(|group| (group, peak)).collect();
        let table = table(
            &rows,
            1,
            &[
                (grouping.title, |(group, _)| group.name.clone()),
                ("bytes", |(group, _)| Bytes(group.peak_bytes).to_string()),
                ("share", |(group, peak)| number(ratio(group.peak_bytes * 100, *peak), 1) + " %"),
                ("blocks", |(group, _)| group.peak_blocks.to_string()),
            ],
        );
        self.session.show(table)?;
        match rest {
            0 => self.session.show(""),
            _ => self.session.show(format_args!("and {} in other groups\n", Bytes(rest))),
        }
    }

    /// What lay where at the end of a snapshot.
    fn recorded(&self, program: &Program) -> Result<(), Failure> {
        if program.memory.is_empty() {
            return Ok(());
        }
        let map = Map::new(program.memory.clone(), 0, 0).held_only();
        let Figures { live, free, waiting, largest_free, segments, .. } = map.figures();
        self.heading(&format!("When the snapshot was taken, {} were held", Bytes(live + free + waiting)))?;
        let waiting = match waiting {
            0 => String::new(),
            bytes => format!(" {} had been given back and were still in use by a stream.", Bytes(bytes)),
        };
        self.say(&format!(
            "In {}, {} were live and {} free, the largest piece of them {}.{waiting}",
            plural(segments, "segment"),
            Bytes(live),
            Bytes(free),
            Bytes(largest_free)
        ))?;
        self.session.show(format_args!("{}\n", self.style.draw(&map)))
    }

    fn allocators(&self, study: &Study) -> Result<(), Failure> {
        self.heading("What allocators hold for it")?;
        let peak = study.profile.peak.bytes;
        let rows: Vec<(&Case, u64)> = study.cases.iter().map(|case| (case, peak)).collect();
        let table = table(
            &rows,
            1,
            &[
                ("allocator", |(case, _)| case.manager.title()),
                ("holds", |(case, _)| optional(case.holds().map(Bytes))),
                ("holds, ratio", |(case, peak)| number(case.holds().and_then(|bytes| ratio(bytes, *peak)), 3)),
                ("OOMs", |(case, _)| case.sampled.refused_at.len().to_string()),
                ("smallest device", |(case, _)| optional(case.smallest_device.map(Bytes))),
                ("driver calls", |(case, _)| optional(case.finishes().then_some(case.sampled.calls))),
                ("driver ms, modelled", |(case, _)| number(case.driver_us().map(|us| us / 1e3), 1)),
                ("smallest card", |(case, _)| optional(case.smallest_device.and_then(smallest_card))),
            ],
        )
        .ending_in_text();
        self.session.show(format_args!("{table}\n"))?;
        if study.splitting().is_some() {
            self.say(&format!("Frames are not split by default. {SPLITTING}"))?;
        }
        Ok(())
    }

    fn fragmentation(&self, study: &Study) -> Result<(), Failure> {
        let Some(usual) = study.usual().filter(|usual| usual.finishes()) else { return Ok(()) };
        let Some(map) = &usual.sampled.fullest else { return Ok(()) };
        let Figures { live, free, segments, .. } = map.figures();
        let peak = study.profile.peak.bytes;
        let unused = usual.sampled.peak_reserved.saturating_sub(peak);
        self.heading(&format!("What fragmentation costs: {}", Bytes(unused)))?;
        self.say(&format!(
            "{} holds most when it has {} in {}. Of these, {} are live, with what sizes are rounded \
             up by, and {} are free in its cache. The program never needed more than {}. A request takes new memory \
             if no free piece is large enough.",
            usual.manager.name,
            Bytes(usual.sampled.peak_reserved),
            plural(segments, "segment"),
            Bytes(live),
            Bytes(free),
            Bytes(peak)
        ))?;
        self.session.show(format_args!("{}\n", self.style.draw(&map.held_only())))
    }

    fn exhausted(&self, study: &Study, exhausted: &Exhausted) -> Result<(), Failure> {
        let Exhausted { device_bytes, refusal, .. } = exhausted;
        let usual = study.usual().map(|usual| &usual.manager);
        let who = usual.map_or("", |usual| &usual.name);
        let size = Bytes(*device_bytes);
        let Oom { free_bytes, largest_free_bytes, finishes_with, .. } = oom(exhausted, study);
        let requested = Bytes(refusal.refusal.bytes);
        self.heading(&format!("On a device of {size}, {who} runs out of memory while {} are free", Bytes(free_bytes)))?;
        let asks = format!(
            "Event {} of {} asks for {requested}, and the largest free piece has {}.",
            refusal.event,
            study.profile.buckets.events,
            Bytes(largest_free_bytes)
        );
        let about = exhausted.about_device(study.profile.peak.bytes);
        let all = [about, Some(asks), usual.and_then(|usual| exhausted.why_not_served(usual))];
        self.say(&all.into_iter().flatten().collect::<Vec<_>>().join(" "))?;
        self.session.show(format_args!("{}\n", self.style.draw(&refusal.map)))?;
        self.say(&match &finishes_with[..] {
            [] => "None of the allocators above finishes there.".to_owned(),
            names => format!("It finishes there with: {}.", names.join("; ")),
        })
    }
}
