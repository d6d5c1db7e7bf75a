//! Rows of results: all benchmarks have the same kind, and one way of printing it.

use aquifer_stress::exit::Outcome;
use aquifer_stress::table::Table;
use aquifer_stress::text::Bytes;
use serde::{Serialize, Serializer};
use serde_json::Value;

/// A result: named texts and figures, in the order in which they are shown.
///
/// The ending of a name says the unit, such as `_bytes` or `_us`.
#[derive(Debug, Default)]
pub(crate) struct Row(Vec<(&'static str, Value)>);

impl Row {
    pub(crate) fn new() -> Row {
        Row::default()
    }

    /// The row with another text or figure; figures are rounded to thousandths. `None` is a figure
    /// that there is not.
    pub(crate) fn with(mut self, name: &'static str, value: impl Into<Value>) -> Row {
        let value = value.into();
        let figure = value.as_f64().filter(|_| value.is_f64());
        self.0.push((name, figure.map_or(value, |figure| ((figure * 1e3).round() / 1e3).into())));
        self
    }

    /// The row with a time, given in nanoseconds.
    pub(crate) fn us(self, name: &'static str, ns: f64) -> Row {
        self.with(name, ns / 1e3)
    }

    /// The row, after what was measured where.
    pub(crate) fn of(mut self, benchmark: &str, allocator: &str, device: &str) -> Row {
        let names = [("benchmark", benchmark), ("allocator", allocator), ("device", device)];
        let names = names.into_iter().filter(|(_, value)| !value.is_empty());
        self.0.splice(0..0, names.map(|(name, value)| (name, value.into())));
        self
    }

    /// Whether the device found violations, or a result was wrong.
    pub(crate) fn outcome(&self) -> Outcome {
        let is_wrong = |(name, value): &(&str, Value)| ["violations", "wrong_results"].contains(name) && *value != 0;
        if self.0.iter().any(is_wrong) { Outcome::Violations } else { Outcome::Done }
    }

    /// A text or figure of the row.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|(name, _)| *name)
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// `part / whole`, unless `whole` is 0.
#[expect(clippy::cast_precision_loss, reason = "a ratio to display")]
pub(crate) fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// A table of the rows that have the same names, and so on.
pub(crate) fn tables(rows: &[&Row]) -> String {
    let mut kinds: Vec<Vec<&Row>> = Vec::new();
    for &row in rows {
        match kinds.iter_mut().find(|kind| kind[0].names().eq(row.names())) {
            Some(kind) => kind.push(row),
            None => kinds.push(vec![row]),
        }
    }
    let tables: Vec<String> = kinds.iter().map(|rows| table(rows).to_string()).collect();
    tables.join("\n\n")
}

fn table(rows: &[&Row]) -> Table {
    // The device stands on standard error.
    let shown = |row: &&Row| {
        let shown = row.0.iter().filter(|(name, _)| *name != "device");
        shown.map(|(name, value)| (name.replace('_', " "), cell(name, value))).collect()
    };
    Table::new(rows.iter().map(shown).collect())
}

fn cell(name: &str, value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_u64() {
            Some(bytes) if name.ends_with("bytes") => Bytes(bytes).to_string(),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_one_kind_are_a_table_and_figures_end_at_the_right() {
        let row = |name: &str, us: Option<f64>| {
            Row::new().with("of", name).with("peak_bytes", 3_u64 << 20).with("time_us", us).of("b", "", "sim")
        };
        let rows = [row("one", Some(12.3456)), Row::new().with("n", 1).of("c", "", "sim"), row("the other", None)];
        let line = "─".repeat(41);
        let text = format!(
            "benchmark  of         peak bytes  time us\n{line}\n\
             b          one          3.00 MiB   12.346\n\
             b          the other    3.00 MiB        -\n{line}\n\n\
             benchmark  n\n────────────\nc          1\n────────────"
        );
        assert_eq!(tables(&rows.iter().collect::<Vec<_>>()), text);
        let json = serde_json::to_string(&rows[0]).unwrap();
        assert_eq!(json, r#"{"benchmark":"b","device":"sim","of":"one","peak_bytes":3145728,"time_us":12.346}"#);
    }
}
