//! `report`: a page in a file that shows a recorded program's memory over time, under several
//! allocators.

use std::path::Path;

use aquifer_trace::input::Program;
use aquifer_trace::profile::{Buckets, Grouping, Peak, Range};
use aquifer_trace::{Figures, Map};
use serde::Serialize;

use crate::cli::ReportArgs;
use crate::commands::study::advice::advise;
use crate::commands::study::answers::{headline_of, of_recording, of_replays, too_large};
use crate::commands::study::rows::{self, Advice, Answer};
use crate::commands::study::sampled::Space;
use crate::commands::study::{Asked, Exhausted, Study};
use crate::commands::{failed, jobs, on_simulator};
use crate::exit::{Failure, Outcome};
use crate::output;
use crate::session::Session;
use crate::text::Bytes;

/// The page without data.
const PAGE: &str = include_str!("../../report/page.html");
/// The library that draws charts.
const CHARTS: [(&str, &str); 2] = [
    ("<!--UPLOT-CSS-->", include_str!("../../report/uPlot.min.css")),
    ("/*UPLOT-JS*/", include_str!("../../report/uPlot.iife.min.js")),
];

/// Maps of each allocator.
const MAPS: usize = 120;
/// Refusals of each allocator that are marked.
const REFUSALS: usize = 1000;

/// The data of a program on the page.
#[derive(Debug, Serialize)]
struct Data<'a> {
    format: u32,
    title: &'a str,
    facts: Vec<(&'static str, String)>,
    notes: Vec<&'a String>,
    buckets: &'a Buckets,
    requested: &'a Range,
    peak: Peak,
    /// The moment that is shown first.
    moment: Peak,
    groups: &'a [Grouping],
    allocators: Vec<Allocator<'a>>,
    oom: Option<Oom<'a>>,
}

#[derive(Debug, Serialize)]
struct Allocator<'a> {
    id: &'a str,
    /// Its name in the list of those that finish on the device that is too small for another.
    title: String,
    options: &'a str,
    #[serde(flatten)]
    figures: rows::Allocator,
    reserved: &'a Range,
    allocated: &'a Range,
    refused_at: &'a [u64],
    space: Option<Space>,
}

#[derive(Debug, Serialize)]
struct Oom<'a> {
    allocator: &'a str,
    /// Sentences about the device and the request.
    about: String,
    #[serde(flatten)]
    figures: &'a rows::Oom,
    bucket: usize,
    live: u64,
    space: Option<Space>,
}

/// Runs the command.
///
/// # Errors
/// When no recording can be read, an allocator fails for another reason than lack of memory, or the
/// file cannot be written.
pub fn run(session: &Session, args: &ReportArgs) -> Result<Outcome, Failure> {
    let simulated = on_simulator(session, "report")?;
    let session = simulated.as_ref().unwrap_or(session);
    let mut outcome = Outcome::Done;
    let named = jobs(session, &args.recordings.files, &mut outcome, true).into_iter().flatten();
    let programs: Vec<Program> = named.map(|(name, program)| Program { name, ..program }).collect();
    Ok(outcome.max(write(session, &programs, &args.output)?))
}

/// Writes a page about these programs. Those that fail are reported and left out.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn write(session: &Session, programs: &[Program], path: &Path) -> Result<Outcome, Failure> {
    let (mut all, mut outcome) = (Vec::new(), Outcome::Done);
    for program in programs {
        match data(session, program) {
            Ok(data) => all.push(data),
            Err(failure) => failed(session, &program.name, &failure, &mut outcome),
        }
    }
    if !all.is_empty() {
        let page = page(&all);
        output::write(path, &page)?;
        session.message(format_args!("report: {}: {}", path.display(), Bytes(page.len() as u64)));
    }
    Ok(outcome)
}

/// The page of these programs, of which each has a head as HTML and data as JSON.
fn page(programs: &[(String, String)]) -> String {
    let (heads, data): (Vec<&str>, Vec<&str>) = programs.iter().map(|(head, data)| (&**head, &**data)).unzip();
    // No text in the data can end the script that holds them, or be the place of the heads.
    let data = format!("[{}]", data.join(",")).replace('<', "\\u003c");
    let charts = CHARTS.iter().fold(PAGE.to_owned(), |page, (place, text)| page.replacen(place, text, 1));
    charts.replacen("/*DATA*/", &data, 1).replacen("<!--HEADS-->", &heads.join("\n"), 1)
}

/// The head of a program: what it is, answers and advice. It is read without JavaScript, too.
fn head(title: &str, subtitle: &str, answers: &[Answer], advice: &[Advice]) -> String {
    let [title, subtitle] = [title, subtitle].map(html);
    let answers = answers.iter().map(|Answer { question, answer }| {
        format!("<div><dt>{}</dt><dd>{}</dd></div>\n", html(question), html(answer))
    });
    let answers: String = answers.collect();
    let advice = advice.iter().map(|Advice { title, text, saves, .. }| {
        let saves = saves.filter(|&bytes| bytes > 0);
        let saves = saves.map(|bytes| format!(" <span class=\"soft\">({} less held)</span>", Bytes(bytes)));
        format!("<li><b>{}</b><br>{}{}</li>\n", html(title), html(text), saves.unwrap_or_default())
    });
    let advice: String = advice.collect();
    let list =
        if advice.is_empty() { advice } else { format!("<h2>Advice</h2>\n<ul class=\"advice\">\n{advice}</ul>\n") };
    format!(
        "<header>\n<h1>{title}</h1>\n<p class=\"soft\">{subtitle}</p>\n<dl class=\"answers\">\n{answers}</dl>\n{list}</header>"
    )
}

/// A text as HTML, with code between backquotes. Long options may break.
fn html(text: &str) -> String {
    let (mut html, mut in_code, mut chars) = (String::new(), false, text.chars().peekable());
    while let Some(char) = chars.next() {
        match char {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '`' => {
                html.push_str(if in_code { "</code>" } else { "<code>" });
                in_code = !in_code;
            }
            _ => html.push(char),
        }
        if "_:,=".contains(char) && chars.peek().is_some_and(|next| next.is_alphanumeric()) {
            html.push_str("<wbr>");
        }
    }
    html + if in_code { "</code>" } else { "" }
}

/// The head of a program, and its data as JSON.
fn data(session: &Session, program: &Program) -> Result<(String, String), Failure> {
    let name = &program.name;
    let study = Study::of(session, name, program, Asked::of(session, program)?, MAPS)?;
    let advice = if program.has_history { advise(session, name, program, &study) } else { Vec::new() };
    let mut answers = of_recording(program, &study.profile, study.asked.as_ref());
    answers.extend(of_replays(program, &study, &advice));
    let header = |key: &str| program.headers.iter().find(|(known, _)| known == key).map_or("", |(_, value)| value);
    let title = format!("{name} {}", headline_of(program, &study.profile, study.asked.as_ref()));
    let head = head(&title, header("what"), &answers, &advice);
    let none = Range::default();
    let recorded = (!program.memory.is_empty()).then(|| recorded(program, &study, &none));
    let data = Data {
        format: 1,
        title: name,
        facts: facts(program, &study),
        notes: program.notes.iter().chain(&study.notes).collect(),
        buckets: &study.profile.buckets,
        requested: &study.profile.requested,
        peak: study.profile.peak,
        moment: study.profile.moment,
        groups: &study.profile.groups,
        allocators: study
            .cases
            .iter()
            .map(|case| Allocator {
                id: &case.manager.id,
                title: case.manager.title(),
                options: &case.manager.options,
                figures: case.row(study.profile.peak.bytes),
                reserved: &case.sampled.reserved,
                allocated: &case.sampled.allocated,
                refused_at: &case.sampled.refused_at[..case.sampled.refused_at.len().min(REFUSALS)],
                space: Space::of(&case.sampled.moments, false),
            })
            .chain(recorded)
            .collect(),
        oom: study.exhausted.as_ref().map(|exhausted| oom(&study, exhausted)),
    };
    let data = serde_json::to_string(&data).map_err(|error| Failure::Output(error.into()))?;
    Ok((head, data))
}

/// The allocator of a snapshot, of which only the end is known.
fn recorded<'a>(program: &Program, study: &Study, none: &'a Range) -> Allocator<'a> {
    let map = Map::new(program.memory.clone(), 0, 0);
    let Figures { live, free, waiting, .. } = map.figures();
    Allocator {
        id: "snapshot",
        title: String::new(),
        options: "when it was taken",
        figures: rows::Allocator {
            name: "In the snapshot".to_owned(),
            peak_reserved_bytes: live + free + waiting,
            ..rows::Allocator::default()
        },
        reserved: none,
        allocated: none,
        refused_at: &[],
        space: Space::of(&[(study.profile.buckets.n.saturating_sub(1), map)], false),
    }
}

fn facts(program: &Program, study: &Study) -> Vec<(&'static str, String)> {
    let mut facts = vec![
        ("Events", study.profile.buckets.events.to_string()),
        ("Allocations", program.allocs().to_string()),
        ("Streams", program.streams_used().to_string()),
        ("Most requested", Bytes(study.profile.peak.bytes).to_string()),
    ];
    facts.extend(program.refused().map(|bytes| ("Refused at the end, counted as served", Bytes(bytes).to_string())));
    facts.extend(
        program
            .options
            .as_ref()
            .filter(|options| !options.is_empty())
            .map(|options| ("Options of the recording", options.clone())),
    );
    facts
}

fn oom<'a>(study: &'a Study, exhausted: &'a Exhausted) -> Oom<'a> {
    let Exhausted { oom, refusal } = exhausted;
    let usual = study.usual().map(|usual| &usual.manager);
    let peak = study.profile.peak.bytes;
    let too_large = too_large(peak, oom.device_bytes).map(|text| text + ".");
    let about = [exhausted.about_device(peak), too_large, usual.and_then(|usual| exhausted.why_not_served(usual))];
    Oom {
        allocator: usual.map_or("", |usual| &usual.id),
        about: about.into_iter().flatten().collect::<Vec<_>>().join(" "),
        figures: oom,
        bucket: study.profile.buckets.of(oom.event),
        live: refusal.map.figures().live,
        space: Space::of(&[(0, refusal.map.clone())], true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Global;
    use aquifer_trace::input;

    #[test]
    fn the_page_holds_the_data_and_nothing_in_them_ends_it() {
        let text = "# name: </script><b>/*DATA*/\na 1 5000000 0\na 2 3000000 3\nf 1 0\nf 2 3\n";
        let program = &input::read("p.trace".as_ref(), text.as_bytes()).unwrap()[0];
        let session = Session::new(&Global { device: Some("sim:1GiB".parse().unwrap()), ..Global::default() }).unwrap();
        let data = data(&session.for_measuring(), program).unwrap();
        let page = page(&[data.clone(), data]);
        for (place, _) in CHARTS {
            assert!(!page.contains(place), "{place}");
        }
        assert!(!page.contains("</script><b>") && !page.contains("<!--HEADS-->"));
        let (shown, _) = page.split_once("<script").unwrap();
        assert_eq!(shown.matches("<h1>&lt;/script>&lt;b>/*DATA*/ uses at most 7.63 MiB").count(), 2);
        assert_eq!(shown.matches("<dt>").count(), 2 * 9, "the nine answers of both stand in the page itself");
        let from = page.find("id=\"data\">").unwrap() + "id=\"data\">".len();
        let to = from + page[from..].find("</script>").unwrap();
        let read: serde_json::Value = serde_json::from_str(&page[from..to]).unwrap();
        assert_eq!(read[1]["title"], "</script><b>/*DATA*/");
        assert_eq!(read[0]["peak"]["bytes"], 8_000_000);
        assert_eq!(read[0]["allocators"].as_array().unwrap().len(), 3);
        assert_eq!(read[0]["allocators"][0]["space"]["rows"][1].as_str().unwrap().len(), 1536);
    }
}
