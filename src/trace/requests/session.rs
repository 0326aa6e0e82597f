//! Parses a line of kv-cache-tester: a session, whose requests are checked one by one as they are read.
//!
//! Lines are long and have many requests, so no request is stored. If the block size and the scope of ids come
//! before the requests, as in the published traces, one pass over the line suffices; otherwise the requests wait as a
//! piece of the line.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::input::Line;
use super::parse::{Parser, Sink, seconds, too_much};
use super::request::{REQUESTS_MAX, Request};
use crate::error::{Error, Result};

/// A request, or a sub-agent with requests of its own.
#[derive(Deserialize)]
struct Element<'a> {
    #[serde(borrow)]
    t: &'a RawValue,
    #[serde(rename = "in", default)]
    input: u32,
    #[serde(default)]
    out: u32,
    #[serde(borrow)]
    hash_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    requests: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    BlockSize,
    HashIdScope,
    Requests,
    #[serde(other)]
    Other,
}

/// Passes every element of a list to a function. Our error ends the reading through an error of serde's, which
/// cannot carry it, so it is stored separately.
struct Each<'f, F> {
    take: F,
    failed: &'f mut Option<Error>,
}

impl<'de, F: FnMut(Element<'de>) -> Result<()>> DeserializeSeed<'de> for Each<'_, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, list: D) -> std::result::Result<(), D::Error> {
        list.deserialize_seq(self)
    }
}

impl<'de, F: FnMut(Element<'de>) -> Result<()>> Visitor<'de> for Each<'_, F> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a list of requests")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> std::result::Result<(), A::Error> {
        while let Some(element) = list.next_element()? {
            (self.take)(element).map_err(|e| aside(self.failed, e))?;
        }
        Ok(())
    }
}

fn aside<E: de::Error>(failed: &mut Option<Error>, e: Error) -> E {
    *failed = Some(e);
    E::custom("")
}

/// Reads a list that is a piece of the line.
fn each<'de>(
    line: Line<'de>,
    list: &'de RawValue,
    take: impl FnMut(Element<'de>) -> Result<()>,
) -> Result<()> {
    let mut failed = None;
    let read =
        Each { take, failed: &mut failed }.deserialize(&mut serde_json::Deserializer::from_str(list.get()));
    failed.map_or(Ok(()), Err)?;
    read.map_err(|e| line.json_behind(&e, line.column(list.get()) - 1))
}

/// The state of a session while its line is read.
struct Session<'s, 'p, 'l> {
    parser: &'s mut Parser<'p>,
    line: Line<'l>,
    sink: &'s mut Sink<'s>,
    failed: &'s mut Option<Error>,
}

impl<'de> Visitor<'de> for Session<'_, '_, 'de> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a session")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        let Session { parser, line, sink, failed } = self;
        let (mut block_size, mut scope, mut waiting, mut done) = (None, None::<Option<String>>, None, false);
        while let Some(field) = map.next_key()? {
            match field {
                Field::BlockSize if block_size.is_some() => {
                    return Err(de::Error::duplicate_field("block_size"));
                }
                Field::BlockSize => block_size = Some(map.next_value()?),
                Field::HashIdScope if scope.is_some() => {
                    return Err(de::Error::duplicate_field("hash_id_scope"));
                }
                Field::HashIdScope => scope = Some(map.next_value()?),
                Field::Requests if done || waiting.is_some() => {
                    return Err(de::Error::duplicate_field("requests"));
                }
                Field::Requests => match (block_size, &scope) {
                    (Some(block_size), Some(scope)) => {
                        parser
                            .begin_session(line, block_size, scope.as_deref())
                            .map_err(|e| aside(failed, e))?;
                        let take = |element| parser.element(line, block_size, element, sink);
                        map.next_value_seed(Each { take, failed })?;
                        done = true;
                    }
                    _ => waiting = Some(map.next_value::<&RawValue>()?),
                },
                Field::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        if done {
            return Ok(());
        }
        let block_size = block_size.ok_or_else(|| de::Error::missing_field("block_size"))?;
        let list = waiting.ok_or_else(|| de::Error::missing_field("requests"))?;
        let scope = scope.flatten();
        let read = parser
            .begin_session(line, block_size, scope.as_deref())
            .and_then(|()| each(line, list, |element| parser.element(line, block_size, element, sink)));
        read.map_err(|e| aside(failed, e))
    }
}

impl Parser<'_> {
    /// A session, with its own times and ids.
    pub(super) fn session<'l>(&mut self, line: Line<'l>, sink: &mut Sink<'_>) -> Result<()> {
        let mut failed = None;
        let mut json = serde_json::Deserializer::from_slice(line.bytes);
        let mut pass = |request: Request<'_>| sink(request);
        let session = Session { parser: self, line, sink: &mut pass, failed: &mut failed };
        let read = (&mut json).deserialize_map(session).and_then(|()| json.end());
        failed.map_or(Ok(()), Err)?;
        read.map_err(|e| line.json(&e))
    }

    fn begin_session(&mut self, line: Line<'_>, block_size: u32, scope: Option<&str>) -> Result<()> {
        if block_size == 0 || self.block_tokens.is_some_and(|known| known != block_size) {
            return Err(line
                .wrong("`block_size` is 0 or not that of the lines before", 1)
                .with("block_size", block_size));
        }
        self.block_tokens = Some(block_size);
        if scope.is_none_or(|scope| scope == "local") {
            self.interner.next_scope();
        }
        self.notes.sessions += 1;
        if self.notes.sessions > REQUESTS_MAX {
            return Err(too_much("too many sessions", line, REQUESTS_MAX));
        }
        self.last = 0.0;
        Ok(())
    }

    /// An element of a session's list.
    fn element<'l>(
        &mut self,
        line: Line<'l>,
        block_size: u32,
        element: Element<'l>,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let time = seconds(line, element.t)?;
        self.in_order(line, time, line.column(element.t.get()))?;
        match element.requests {
            Some(inner) => self.subagent(line, block_size, time, inner, sink),
            None => self.request(line, block_size, time, &element, sink),
        }
    }

    /// A sub-agent runs concurrently with its session, so its times may overlap the elements that follow it.
    fn subagent<'l>(
        &mut self,
        line: Line<'l>,
        block_size: u32,
        time: f64,
        inner: &'l RawValue,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        self.notes.subagents += 1;
        if !self.options.subagents {
            each(line, inner, |_| {
                self.notes.subagent_requests += 1;
                Ok(())
            })?;
            self.begin(line)?;
            return self.end(time, 0, 0, sink);
        }
        each(line, inner, |element| {
            self.notes.subagent_requests += 1;
            if element.requests.is_some() {
                let column = line.column(element.t.get());
                return Err(line.wrong("a sub-agent inside a sub-agent", column));
            }
            let time = seconds(line, element.t)?;
            self.request(line, block_size, time, &element, sink)
        })
    }

    fn request(
        &mut self,
        line: Line<'_>,
        block_size: u32,
        time: f64,
        element: &Element<'_>,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let ids = element
            .hash_ids
            .ok_or_else(|| line.wrong("a request without `hash_ids`", line.column(element.t.get())))?;
        self.begin(line)?;
        self.list(line, ids, u64::from(element.input.div_ceil(block_size)))?;
        self.end(time, element.input, element.out, sink)
    }
}
