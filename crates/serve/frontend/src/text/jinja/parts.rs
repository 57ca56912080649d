//! Whether a template takes the content of messages as a list of parts.
//!
//! Source of the rule: `_detect_content_format` in `vllm/renderers/hf.py`, which calls the two kinds "openai" and "string".
//! A template takes parts if it loops over the content of a message: of a variable that goes over `messages` or over an
//! alias of it, of a macro's parameter that is called with such a content, or of a variable named `content`.

use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Stmt};
use minijinja::machinery::parse;
use minijinja::syntax::SyntaxConfig;

use super::source::{EACH, SLICE};

/// Whether the template `source`, rewritten by [`rewrite`](super::rewrite), takes parts.
pub(crate) fn takes_parts(source: &str) -> bool {
    let Ok(template) = parse(source, "", SyntaxConfig::default()) else {
        return false;
    };
    let mut found = Found::default();
    found.statement(&template, None);
    found.loops_over_content()
}

/// The parts of a template that decide.
#[derive(Default)]
struct Found<'t, 's> {
    /// Targets and values of `set`.
    assigned: Vec<(&'t Expr<'s>, &'t Expr<'s>)>,
    /// Loops, each with the macro around it.
    loops: Vec<(&'t ForLoop<'s>, Option<usize>)>,
    macros: Vec<&'t Macro<'s>>,
    calls: Vec<&'t Call<'s>>,
}

impl<'t, 's> Found<'t, 's> {
    fn statements(&mut self, body: &'t [Stmt<'s>], within: Option<usize>) {
        for statement in body {
            self.statement(statement, within);
        }
    }

    fn statement(&mut self, statement: &'t Stmt<'s>, within: Option<usize>) {
        match statement {
            Stmt::Template(of) => self.statements(&of.children, within),
            Stmt::EmitExpr(of) => self.expression(&of.expr),
            Stmt::ForLoop(of) => {
                self.loops.push((of, within));
                self.expression(&of.iter);
                of.filter_expr.iter().for_each(|expr| self.expression(expr));
                self.statements(&of.body, within);
                self.statements(&of.else_body, within);
            }
            Stmt::IfCond(of) => {
                self.expression(&of.expr);
                self.statements(&of.true_body, within);
                self.statements(&of.false_body, within);
            }
            Stmt::WithBlock(of) => {
                of.assignments
                    .iter()
                    .for_each(|(_, value)| self.expression(value));
                self.statements(&of.body, within);
            }
            Stmt::Set(of) => {
                self.assigned.push((&of.target, &of.expr));
                self.expression(&of.expr);
            }
            Stmt::SetBlock(of) => self.statements(&of.body, within),
            Stmt::AutoEscape(of) => self.statements(&of.body, within),
            Stmt::FilterBlock(of) => self.statements(&of.body, within),
            Stmt::Block(of) => self.statements(&of.body, within),
            Stmt::Macro(of) => self.one_macro(of),
            Stmt::CallBlock(of) => {
                self.call(&of.call);
                self.statements(&of.macro_decl.body, within);
            }
            Stmt::Do(of) => self.call(&of.call),
            _ => {}
        }
    }

    fn one_macro(&mut self, of: &'t Macro<'s>) {
        self.macros.push(of);
        let within = Some(self.macros.len() - 1);
        self.statements(&of.body, within);
    }

    fn call(&mut self, call: &'t Call<'s>) {
        self.calls.push(call);
        self.expression(&call.expr);
        self.arguments(&call.args);
    }

    fn arguments(&mut self, args: &'t [CallArg<'s>]) {
        for arg in args {
            let (CallArg::Pos(of)
            | CallArg::Kwarg(_, of)
            | CallArg::PosSplat(of)
            | CallArg::KwargSplat(of)) = arg;
            self.expression(of);
        }
    }

    /// Looks for calls of macros.
    fn expression(&mut self, expr: &'t Expr<'s>) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(of) => self.expression(&of.expr),
            Expr::UnaryOp(of) => self.expression(&of.expr),
            Expr::BinOp(of) => {
                self.expression(&of.left);
                self.expression(&of.right);
            }
            Expr::Compare(of) => {
                self.expression(&of.expr);
                of.ops.iter().for_each(|op| self.expression(&op.expr));
            }
            Expr::IfExpr(of) => {
                self.expression(&of.test_expr);
                self.expression(&of.true_expr);
                of.false_expr.iter().for_each(|expr| self.expression(expr));
            }
            Expr::Filter(of) => {
                of.expr.iter().for_each(|expr| self.expression(expr));
                self.arguments(&of.args);
            }
            Expr::Test(of) => {
                self.expression(&of.expr);
                self.arguments(&of.args);
            }
            Expr::GetAttr(of) => self.expression(&of.expr),
            Expr::GetItem(of) => {
                self.expression(&of.expr);
                self.expression(&of.subscript_expr);
            }
            Expr::Call(of) => self.call(of),
            Expr::List(of) => of.items.iter().for_each(|item| self.expression(item)),
            Expr::Tuple(of) => of.items.iter().for_each(|item| self.expression(item)),
            Expr::Map(of) => of.values.iter().for_each(|value| self.expression(value)),
        }
    }

    fn loops_over_content(&self) -> bool {
        let lists = self.aliases("messages");
        let mut messages: Vec<&str> = Vec::new();
        for (of, _) in &self.loops {
            if lists.iter().any(|list| is_elements(&of.iter, list)) {
                // vLLM fails to read other targets, and takes such a template's contents as texts.
                let Expr::Var(target) = &of.target else {
                    return false;
                };
                messages.push(target.id);
            }
        }
        let is_content = |expr: &Expr<'_>| {
            messages
                .iter()
                .any(|message| is_member_elements(expr, message, "content"))
        };
        let parameters: Vec<Vec<&str>> = (self.macros.iter())
            .map(|of| self.content_parameters(of, &is_content))
            .collect();
        self.loops.iter().any(|(of, within)| {
            let name = variable(&of.iter);
            let is_parameter =
                |within: &usize| name.is_some_and(|name| parameters[*within].contains(&name));
            is_content(&of.iter)
                || within.as_ref().is_some_and(is_parameter)
                || (within.is_none() && name == Some("content"))
        })
    }

    /// Parameters of a macro that some call fills with a content.
    fn content_parameters(
        &self,
        of: &Macro<'s>,
        is_content: &dyn Fn(&Expr<'_>) -> bool,
    ) -> Vec<&'s str> {
        let names: Vec<&str> = of.args.iter().filter_map(variable_of).collect();
        let mut found = Vec::new();
        for call in &self.calls {
            if !matches!(&call.expr, Expr::Var(name) if name.id == of.name) {
                continue;
            }
            for (at, arg) in call.args.iter().enumerate() {
                match arg {
                    CallArg::Pos(value) if is_content(value) => found.extend(names.get(at)),
                    CallArg::Kwarg(name, value) if is_content(value) => found.push(*name),
                    _ => {}
                }
            }
        }
        found
    }

    /// `name`, and the variables and members of namespaces that are set to it or to a part of it.
    fn aliases(&self, name: &str) -> Vec<String> {
        let mut known = vec![name.to_owned()];
        let mut at = 0;
        while at < known.len() {
            let of = known[at].clone();
            let mut more = Vec::new();
            for (target, value) in &self.assigned {
                if is_elements(value, &of) {
                    more.extend(dotted(target));
                }
                if let (Expr::Var(target), Expr::Call(call)) = (target, value)
                    && matches!(&call.expr, Expr::Var(name) if name.id == "namespace")
                {
                    for arg in &call.args {
                        if let CallArg::Kwarg(key, value) = arg
                            && is_elements(value, &of)
                        {
                            more.push(format!("{}.{key}", target.id));
                        }
                    }
                }
            }
            for alias in more {
                if !known.contains(&alias) {
                    known.push(alias);
                }
            }
            at += 1;
        }
        known
    }
}

/// A target such as `ns.rest`.
fn dotted(target: &Expr<'_>) -> Option<String> {
    match target {
        Expr::Var(name) => Some(name.id.to_owned()),
        Expr::GetAttr(of) => Some(format!("{}.{}", dotted(&of.expr)?, of.name)),
        _ => None,
    }
}

fn variable_of<'s>(expr: &Expr<'s>) -> Option<&'s str> {
    match expr {
        Expr::Var(name) => Some(name.id),
        _ => None,
    }
}

/// The variable that a loop goes over, without what the rewriting put around it.
fn variable<'s>(iter: &Expr<'s>) -> Option<&'s str> {
    match iter {
        Expr::Filter(of) if of.name == EACH => variable(of.expr.as_ref()?),
        other => variable_of(other),
    }
}

/// Whether `expr` is the variable `name` (or `namespace.member`), filtered, tested or sliced in any way.
fn is_elements(expr: &Expr<'_>, name: &str) -> bool {
    elements(expr, &|expr| dotted(expr).is_some_and(|of| of == name))
}

/// The same for the member `key` of the variable `name`.
fn is_member_elements(expr: &Expr<'_>, name: &str, key: &str) -> bool {
    let is_name = |of: &Expr<'_>| dotted(of).is_some_and(|of| of == name);
    elements(expr, &|expr| match expr {
        Expr::GetAttr(of) => of.name == key && is_name(&of.expr),
        Expr::GetItem(of) => {
            is_name(&of.expr)
                && matches!(&of.subscript_expr, Expr::Const(of) if of.value.as_str() == Some(key))
        }
        _ => false,
    })
}

fn elements(expr: &Expr<'_>, is: &dyn Fn(&Expr<'_>) -> bool) -> bool {
    match expr {
        Expr::Filter(of) => of.expr.as_ref().is_some_and(|expr| elements(expr, is)),
        Expr::Test(of) => elements(&of.expr, is),
        Expr::Slice(of) => elements(&of.expr, is),
        Expr::Call(of) => match &of.expr {
            Expr::GetAttr(method) if method.name == SLICE => elements(&method.expr, is),
            _ => false,
        },
        other => is(other),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rewrite;
    use super::*;

    /// The cases were compared with vLLM 0.33; `python/tests/vllm/test_rendering.py` draws more.
    #[test]
    fn loops_over_contents_are_found() {
        let message = |body: &str| format!("{{% for m in messages %}}{body}{{% endfor %}}");
        let each = |of: &str| format!("{{% for p in {of} %}}{{{{ p.text }}}}{{% endfor %}}");
        for (source, expected) in [
            (message("{{ m.content }}"), false),
            (message(&each("m.content")), true),
            (message(&each("m['content']")), true),
            (message(&each("m.content | list")), true),
            (message(&each("m.content[1:]")), true),
            (message(&each("m.tool_calls")), false),
            (message(&each("(m.content or [])")), false),
            (message(&each("content")), true),
            (each("content"), true),
            (each("messages"), false),
            (
                format!(
                    "{{% set rest = messages[1:] %}}{{% for m in rest %}}{}{{% endfor %}}",
                    each("m.content")
                ),
                true,
            ),
            (
                format!(
                    "{{% set ns = namespace(rest=messages) %}}{{% for m in ns.rest %}}{}{{% endfor %}}",
                    each("m.content")
                ),
                true,
            ),
            (
                format!(
                    "{{% macro show(c) %}}{}{{% endmacro %}}{}",
                    each("c"),
                    message("{{ show(m.content) }}")
                ),
                true,
            ),
            (
                format!(
                    "{{% macro show(c, content) %}}{}{{% endmacro %}}{}",
                    each("content"),
                    message("{{ show(m.content) }}")
                ),
                false,
            ),
            (
                format!(
                    "{{% for a, b in messages %}}{{% endfor %}}{}",
                    each("content")
                ),
                false,
            ),
        ] {
            let rewritten = rewrite(&source).unwrap();
            assert_eq!(takes_parts(&rewritten), expected, "{source}");
        }
    }
}
