//! `options`: lists the options of allocators.

use serde_json::json;

use crate::exit::{Failure, Outcome};
use crate::session::Session;
use crate::table::terminal_columns;
use crate::text::rewrap;

/// Lists the options, as the documentation of `Config` has them, for a terminal.
///
/// # Errors
/// When standard output cannot be written to.
pub fn run(session: &Session) -> Result<Outcome, Failure> {
    let width = terminal_columns().unwrap_or(usize::MAX);
    let say = |text: &str| session.show(rewrap(text, usize::MAX, width));
    let plain = aquifer_allocator::config::OPTIONS.replace("[`", "").replace("`]", "").replace(['`', '*'], "");
    for paragraph in plain.trim().split("\n\n") {
        if !paragraph.starts_with('|') {
            say(&format!("{}\n\n", paragraph.replace('\n', " ")))?;
            continue;
        }
        for line in paragraph.lines().skip(2) {
            let [option, values, default, effect] =
                line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>()[..]
            else {
                continue;
            };
            let row = json!({"option": option, "values": values, "default": default, "effect": effect});
            session.row(&row)?;
            let default = if default.is_empty() { String::new() } else { format!("; default {default}") };
            say(&format!("  {option}: {values}{default}\n      {effect}"))?;
        }
        say("")?;
    }
    Ok(Outcome::Done)
}
