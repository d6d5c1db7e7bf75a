//! `explain`: what a recorded program uses memory for, what allocators make of it, why memory runs
//! out, and what helps.

use aquifer_trace::input::{PoolUse, Program, Recorder};
use aquifer_trace::profile::{Grouping, OTHERS, Peak, Profile};
use aquifer_trace::{Figures, Map};

use crate::cli::ExplainArgs;
use crate::commands::address::{self, Owned};
use crate::commands::advise::show;
use crate::commands::story::Story;
use crate::commands::study::advice::advise;
use crate::commands::study::answers::{headline_of, of_recording, of_replays, too_large};
use crate::commands::study::rows::{Advice, Allocator, Answer, Oom};
use crate::commands::study::{Asked, Case, Exhausted, SPLITTING, Study, more_than, tight};
use crate::commands::{failed, jobs, on_simulator, ratio};
use crate::exit::{Failure, Outcome};
use crate::row::{Row, row};
use crate::session::Session;
use crate::table::{Table, bytes, optional};
use crate::text::{Bytes, plural};

/// Groups that are listed of each grouping.
const LISTED: usize = 8;

/// Runs the command.
///
/// # Errors
/// When standard output cannot be written.
pub fn run(session: &Session, args: &ExplainArgs) -> Result<Outcome, Failure> {
    if let Some(address) = args.address {
        return address::run(session, &args.recordings.files, address);
    }
    let simulated = on_simulator(session, "explain")?;
    let session = simulated.as_ref().unwrap_or(session);
    let mut outcome = Outcome::Done;
    let story = Story::new(session, args.ascii);
    for programs in jobs(session, &args.recordings.files, &mut outcome, true) {
        let mut studies = Vec::new();
        for (name, program) in &programs {
            if program.peak_requested_bytes == 0 {
                session.show(format_args!("{name} never uses memory.\n"))?;
                continue;
            }
            let known = Asked::of(session, program);
            if let ([_], Ok((profile, asked))) = (&programs[..], &known) {
                usage(&story, name, program, profile, asked.as_ref())?;
            }
            match known.and_then(|known| Study::of(session, name, program, known, 0)) {
                Ok(study) => studies.push((&**name, program, study)),
                Err(failure) => failed(session, name, &failure, &mut outcome),
            }
        }
        job(&story, &studies, programs.len() > 1)?;
    }
    Ok(outcome)
}

row! {
    /// A program is replayed under PyTorch's allocator with its default options, with those that a
    /// snapshot names, and with expandable segments, and under this project's with each --config. With
    /// --device they all run on that device, else on one with plenty of memory. Frames are not split by
    /// default; where split_frames:on makes a difference, it is shown, too. Several programs of a file or
    /// folder are the ranks of a job: the one that needs most is explained, and the others stand in a
    /// table.
    ///
    /// JSON keys, per program
    struct Explained {
        /// the program
        trace: String => ["program"],
        /// allocations, frees and uses on other streams
        events: u64,
        /// number of streams that it uses
        streams: usize,
        /// in a sentence each: what ran out, when, who held it, where in the code, what is not recorded, and
        /// then what replays say: what fits, what to change, what a step costs, which card
        answers: Vec<Answer>,
        /// the most memory that the program had requested and not yet freed, with a request that it was
        /// refused at the end
        peak_requested_bytes: u64 => ["requested", bytes],
        /// the event after which that was, from 1
        peak_event: u64,
        /// the blocks live then
        peak_blocks: u64,
        /// groups of these blocks, or of those that were live when a request was refused: on the device
        /// of --device, or else in the recording
        alive: Vec<Alive>,
        /// what allocators make of the program
        allocators: Vec<Allocator>,
        /// how the program runs out of memory with the options that the snapshot names, or else with
        /// PyTorch's default options: on the device of --device or of the recorded refusal, or, where that
        /// suffices, on one that is made up, of 2 % more than it uses in multiples of 2 MiB; null if it
        /// finishes
        oom: Option<Oom>,
        /// as of `advise`, without the name of the program; null without a history, and for all programs
        /// of a file or folder but the one that needs most
        advice: Option<Vec<Advice>>,
        #[serde(skip)]
        usual: Option<u64> => ["PyTorch holds", bytes],
        #[serde(skip)]
        usual_device: Option<u64> => ["smallest device", bytes],
        #[serde(skip)]
        own_device: Option<u64> => ["smallest device with Aquifer", bytes],
    }
}

row! {
    /// Of alive
    struct Alive {
        /// what the blocks are grouped by: tag, stack, size or stream
        by: &'static str,
        /// the group
        name: String => ["name"],
        /// all frames of its call stack
        detail: String,
        /// their size
        bytes: u64 => ["bytes", bytes],
        #[serde(skip)]
        percent: Option<f64> => ["share", |row| optional(row.percent.map(|percent| format!("{percent:.1} %")))],
        /// their number
        blocks: u64 => ["blocks"],
    }
}

/// The help of the keys.
pub(crate) fn help() -> String {
    [Explained::help(), Answer::help(), Alive::help(), Allocator::help(), Oom::help(), Owned::help()].join("\n")
}

fn row(name: &str, program: &Program, study: &Study) -> Explained {
    let Peak { event, bytes, blocks, .. } = study.profile.peak;
    Explained {
        trace: name.to_owned(),
        events: study.profile.buckets.events,
        streams: program.streams_used(),
        answers: of_recording(program, &study.profile, study.asked.as_ref()),
        peak_requested_bytes: bytes,
        peak_event: event,
        peak_blocks: blocks,
        alive: study.profile.groups.iter().flat_map(|grouping| alive(grouping, study.profile.moment.bytes)).collect(),
        allocators: study.cases.iter().map(|case| case.row(bytes)).collect(),
        oom: study.exhausted.as_ref().map(|exhausted| exhausted.oom.clone()),
        advice: None,
        usual: study.usual().and_then(Case::holds),
        usual_device: study.usual().and_then(|case| case.smallest_device),
        own_device: study.own().and_then(|case| case.smallest_device),
    }
}

/// What the recording held, as a row beside those of replays.
fn of_recording_row(program: &Program) -> Allocator {
    Allocator {
        title: "in the recording".to_owned(),
        peak_reserved_bytes: program.recorded.peak_held_bytes,
        reserved_over_requested: ratio(program.recorded.peak_held_bytes, program.peak_requested_bytes),
        ..Allocator::default()
    }
}

/// The groups that are live at the profile's moment.
fn alive(grouping: &Grouping, peak: u64) -> impl Iterator<Item = Alive> {
    let live = grouping.rows.iter().filter(|group| group.peak_blocks > 0);
    live.map(move |group| Alive {
        by: grouping.by,
        name: group.name.clone(),
        detail: group.detail.clone(),
        bytes: group.peak_bytes,
        percent: ratio(group.peak_bytes * 100, peak),
        blocks: group.peak_blocks,
    })
}

/// Prints the programs of a file or folder, which are the ranks of a job: all in a table, and the
/// one that needs most in detail. `with_usage` is false if what it uses was already printed.
fn job(story: &Story<'_>, studies: &[(&str, &Program, Study)], with_usage: bool) -> Result<(), Failure> {
    let mut rows: Vec<Explained> = studies.iter().map(|(name, program, study)| row(name, program, study)).collect();
    let needs = |row: &Explained| (row.usual_device.unwrap_or(u64::MAX), row.peak_requested_bytes);
    let Some(most) = (0..rows.len()).max_by_key(|&index| needs(&rows[index])) else { return Ok(()) };
    let (name, program, study) = &studies[most];
    if rows.len() > 1 {
        story.heading(&format!("{} programs, of which {name} needs most", rows.len()))?;
        story.session.show(format_args!("{}\n", Explained::table(&rows)))?;
    }
    let mut replayed = Vec::new();
    if program.has_history {
        let advice = advise(story.session, name, program, study);
        replayed = of_replays(program, study, &advice);
        rows[most].answers.extend(replayed.clone());
        rows[most].advice = Some(advice);
    }
    rows.iter().try_for_each(|row| story.session.row(row))?;
    if with_usage {
        usage(story, name, program, &study.profile, study.asked.as_ref())?;
    }
    detail(story, program, study, &rows[most], &replayed)
}

fn detail(
    story: &Story<'_>,
    program: &Program,
    study: &Study,
    row: &Explained,
    replayed: &[Answer],
) -> Result<(), Failure> {
    if !program.has_history {
        let how = match program.recorder {
            Recorder::Aquifer => "the option history:1000000",
            _ => "torch.cuda.memory._record_memory_history() before the program allocates",
        };
        return story.say(&format!(
            "The snapshot has no history, so nothing is known of the time before. Turn it on with {how}."
        ));
    }
    story.heading("What replays say")?;
    story.answers(replayed)?;
    story.heading("What allocators hold for it")?;
    let held = (program.recorded.peak_held_bytes > 0).then(|| of_recording_row(program));
    let allocators: Vec<Allocator> = held.into_iter().chain(row.allocators.clone()).collect();
    story.session.show(format_args!("{}\n", Allocator::table(&allocators)))?;
    if program.recorded.begins_late {
        story.say("The recording begins later than the program, so all but what it held are lower bounds.")?;
    }
    if study.splitting().is_some() {
        story.say(&format!("Frames are not split by default. {SPLITTING}"))?;
    }
    fragmentation(story, study)?;
    match &study.exhausted {
        Some(found) => exhausted(story, study, found)?,
        None => {
            let (who, size) = (study.usual().map_or("", |usual| &usual.manager.name), tight(program));
            let more = more_than(study.profile.peak.bytes, size);
            story.say(&format!("With {who} it finishes on a device of {}, {more} than it ever uses.", Bytes(size)))?;
        }
    }
    story.heading("What helps")?;
    show(story.session, study, row.advice.as_deref().unwrap_or_default())
}

/// What the recording says, and what lay where at the end of a snapshot.
fn usage(
    story: &Story<'_>,
    name: &str,
    program: &Program,
    profile: &Profile,
    asked: Option<&Asked>,
) -> Result<(), Failure> {
    story.heading(&format!("{name} {}", headline_of(program, profile, asked)))?;
    if let Some((_, what)) = program.headers.iter().find(|(key, _)| key == "what") {
        story.say(&format!("It is {what}."))?;
    }
    story.answers(&of_recording(program, profile, asked))?;
    let is_refused = program.recorded.oom().is_some() || asked.is_some_and(|asked| asked.refused.is_some());
    story.session.show(if is_refused { "Live at the refusal:" } else { "Live then:" })?;
    let bytes = profile.moment.bytes;
    profile.groups.iter().try_for_each(|grouping| list(story, grouping, bytes))?;
    if program.memory.is_empty() {
        return Ok(());
    }
    let map = Map::new(program.memory.clone(), 0, 0).held_only();
    let Figures { live, free, waiting, largest_free, segments, .. } = map.figures();
    story.heading(&format!("When the snapshot was taken, {} were held", Bytes(live + free + waiting)))?;
    story.say(&format!(
        "In {}, {} were live and {} free, the largest piece of them {}.{}",
        plural(segments, "segment"),
        Bytes(live),
        Bytes(free),
        Bytes(largest_free),
        pending(waiting)
    ))?;
    for PoolUse { id: (one, other), held_bytes, free_bytes, waiting_bytes, live_blocks } in &program.pools {
        let name =
            if (*one, *other) == (0, 0) { "The default pool".into() } else { format!("Private pool ({one}, {other})") };
        let (held, free, blocks) = (Bytes(*held_bytes), Bytes(*free_bytes), plural(*live_blocks, "block"));
        if program.pools.len() > 1 {
            story.say(&format!(
                "{name} held {held}: {free} of it free, the rest in {blocks}.{}",
                pending(*waiting_bytes)
            ))?;
        }
    }
    story.map(&map)
}

/// A sentence about memory that a stream still used.
fn pending(bytes: u64) -> String {
    let said = || format!(" {} had been given back and were still in use by a stream.", Bytes(bytes));
    if bytes == 0 { String::new() } else { said() }
}

/// Prints the largest of the groups that are live at the peak.
fn list(story: &Story<'_>, grouping: &Grouping, peak: u64) -> Result<(), Failure> {
    let mut live: Vec<Alive> = alive(grouping, peak).filter(|group| group.name != OTHERS).collect();
    live.sort_by_key(|group| std::cmp::Reverse(group.bytes));
    live.truncate(LISTED);
    let cells = live.iter().map(|group| {
        let cells = group.cells().into_iter();
        cells.map(|(heading, cell)| (if heading == "name" { grouping.title } else { heading }, cell)).collect()
    });
    story.session.show(Table::new(cells.collect()))?;
    match peak - live.iter().map(|group| group.bytes).sum::<u64>() {
        0 => story.session.show(""),
        rest => story.session.show(format_args!("and {} in other groups\n", Bytes(rest))),
    }
}

fn fragmentation(story: &Story<'_>, study: &Study) -> Result<(), Failure> {
    let Some(usual) = study.usual().filter(|usual| usual.finishes()) else { return Ok(()) };
    let Some(map) = &usual.sampled.fullest else { return Ok(()) };
    let Figures { live, free, movable, segments, .. } = map.figures();
    let peak = study.profile.peak.bytes;
    // What moves to where it is needed serves any request.
    let unused = usual.sampled.peak_reserved.saturating_sub(peak + movable);
    if unused == 0 {
        return Ok(());
    }
    let moves = (movable > 0).then(|| format!(", {} of them in pieces that can move together", Bytes(movable)));
    let moves = moves.unwrap_or_default();
    story.heading(&format!("What fragmentation costs: {}", Bytes(unused)))?;
    story.say(&format!(
        "{} holds most when it has {} in {}. Of these, {} are live, with what sizes are rounded \
         up by, and {} are free in its cache{moves}. The program never needed more than {}. A request takes new memory \
         if no free piece is large enough.",
        usual.manager.name,
        Bytes(usual.sampled.peak_reserved),
        plural(segments, "segment"),
        Bytes(live),
        Bytes(free),
        Bytes(peak)
    ))?;
    story.map(&map.held_only())
}

fn exhausted(story: &Story<'_>, study: &Study, exhausted: &Exhausted) -> Result<(), Failure> {
    let Exhausted { oom, refusal } = exhausted;
    let usual = study.usual().map(|usual| &usual.manager);
    let who = usual.map_or("", |usual| &usual.name);
    let (size, free, requested) = (Bytes(oom.device_bytes), Bytes(oom.free_bytes), Bytes(oom.requested_bytes));
    let peak = study.profile.peak.bytes;
    story.heading(&match too_large(peak, oom.device_bytes) {
        Some(too_large) => too_large,
        None => format!("On a device of {size}, {who} runs out of memory while {free} are free"),
    })?;
    let asks = format!(
        "Event {} of {} asks {who} for {requested}, and the largest free piece has {}.",
        oom.event,
        study.profile.buckets.events,
        Bytes(oom.largest_free_bytes)
    );
    let about = exhausted.about_device(peak);
    let all = [about, Some(asks), usual.and_then(|usual| exhausted.why_not_served(usual))];
    story.say(&all.into_iter().flatten().collect::<Vec<_>>().join(" "))?;
    story.map(&refusal.map)?;
    story.say(&match &oom.finishes_with[..] {
        [] => "None of the allocators above finishes there.".to_owned(),
        names => format!("It finishes there with: {}.", names.join("; ")),
    })
}
