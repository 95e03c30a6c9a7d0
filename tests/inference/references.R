# References of tests/inference: pooled fits by lme4, lmerTest and survival.
#   Rscript tests/inference/references.R DATA OUT.json
# DATA holds inference/ and multisite/ (docs/explanation/mixed-models.md names where the tables come from).
suppressMessages({
  library(lme4)
  library(lmerTest)
  library(survival)
  library(jsonlite)
})
arguments <- commandArgs(trailingOnly = TRUE)
data <- arguments[1]
table_of <- function(name) read.csv(file.path(data, name), check.names = FALSE, stringsAsFactors = TRUE)
control <- glmerControl(optimizer = "bobyqa", optCtrl = list(maxfun = 2e5, rhobeg = 2e-4, rhoend = 2e-9), tolPwrss = 1e-12)
tight <- lmerControl(optimizer = "bobyqa", optCtrl = list(maxfun = 2e5, rhoend = 2e-10))

of_mixed <- function(model, formula, family, file, site = NULL, profile = FALSE) {
  rows <- coef(summary(model))
  spread <- as.data.frame(VarCorr(model))
  out <- list(
    file = file, formula = formula, family = family, terms = rownames(rows), estimate = unname(rows[, "Estimate"]),
    error = unname(rows[, "Std. Error"]), df = if ("df" %in% colnames(rows)) unname(rows[, "df"]) else NULL,
    p = unname(rows[, ncol(rows)]), loglik = as.numeric(logLik(model)), aic = AIC(model), bic = BIC(model),
    rows = nobs(model), spread = I(spread$sdcor)
  )
  modes <- as.data.frame(ranef(model, condVar = TRUE))
  first <- head(modes, 3)
  out$modes <- list(site = as.character(first$grp), term = as.character(first$term), value = first$condval, error = first$condsd)
  # where lme4 itself finds no profile (a better fit, or a spline that is not monotone) there is no reference for it
  ends <- if (profile) tryCatch(suppressWarnings(confint(model, parm = "theta_", quiet = TRUE)), error = function(e) NULL)
  if (!is.null(ends) && !anyNA(ends)) out$profile <- unname(as.matrix(ends))
  out
}
linear <- function(file, text, r = text, reml = TRUE, profile = FALSE) {
  model <- lmerTest::lmer(as.formula(r), table_of(file), REML = reml, control = tight)
  of_mixed(model, text, "gaussian", file, profile = profile) |> c(list(reml = reml))
}
counts <- function(file, text, family, r = text, profile = FALSE, start = NULL) {
  d <- table_of(file)
  first <- glmer(as.formula(r), d, family)
  model <- update(first, start = list(theta = getME(first, "theta"), fixef = fixef(first)), control = control)
  of_mixed(model, text, family, file, profile = profile)
}

out <- list()
sleep <- "inference/sleepstudy.csv"
out$sleepstudy <- linear(sleep, "Reaction ~ Days + (1 + Days | Subject)", profile = TRUE)
out$sleepstudy_ml <- linear(sleep, "Reaction ~ Days + (1 + Days | Subject)", reml = FALSE)
out$sleepstudy_uncorrelated <- linear(sleep, "Reaction ~ Days + (1 + Days || Subject)", profile = TRUE)
out$exam <- linear("multisite/exam.csv", "normexam ~ standLRT + (1 + standLRT | school)", reml = FALSE)
out$exam_reml <- linear("multisite/exam.csv", "normexam ~ standLRT + sex + schgend + (1 + standLRT | school)")
out$exam_none <- linear("multisite/exam.csv", "normexam ~ standLRT + (1 | school)", reml = FALSE)
out$oxboys <- linear("multisite/oxboys.csv", "height ~ age + I(age**2) + (1 + age | Subject)",
                     "height ~ age + I(age^2) + (1 + age | Subject)")
out$math <- linear("multisite/math.csv", "MathAch ~ SES * Sector + MEANSES + Sex + (1 + SES | School)")
out$cbpp <- counts("inference/cbpp.csv", "cbind(incidence, size - incidence) ~ factor(period) + (1 | herd)", "binomial",
                   profile = TRUE)
out$contraception <- counts("multisite/contraception.csv", "use ~ age + I(age**2) + urban + livch + (1 + urban | district)",
                            "binomial", "use ~ age + I(age^2) + urban + livch + (1 + urban | district)")
out$verbagg <- counts("inference/verbagg.csv", "r2 ~ Anger + Gender + btype + situ + (1 | id)", "binomial")
out$epilepsy <- counts("inference/epilepsy.csv", "seizure.rate ~ log(base) + log(age) + treatment + (1 | subject)", "poisson")

patients <- table_of("inference/tcga_brca.csv")
covariates <- names(patients)[1:39]
right <- paste(sprintf("`%s`", covariates), collapse = " + ")
cox <- suppressWarnings(coxph(as.formula(paste("Surv(T, E) ~", right, "+ strata(region)")), patients, ties = "efron",
                              control = coxph.control(eps = 1e-12, iter.max = 60)))
out$tcga <- list(
  file = "inference/tcga_brca.csv", formula = paste("Surv(T, E) ~", right), family = "cox", site = "region",
  terms = covariates, estimate = unname(coef(cox)), error = unname(sqrt(diag(vcov(cox)))), loglik = cox$loglik[2],
  null = cox$loglik[1], rows = cox$n, events = cox$nevent
)
few <- c("age_at_index", "race_asian", "ajcc_pathologic_n_N1", "ajcc_pathologic_n_N2")
right <- paste(sprintf("`%s`", few), collapse = " + ")
cox <- coxph(as.formula(paste("Surv(T, E) ~", right, "+ strata(region)")), patients, ties = "efron",
             control = coxph.control(eps = 1e-12, iter.max = 60))
out$tcga_few <- list(
  file = "inference/tcga_brca.csv", formula = paste("Surv(T, E) ~", right), family = "cox", site = "region",
  terms = few, estimate = unname(coef(cox)), error = unname(sqrt(diag(vcov(cox)))), loglik = cox$loglik[2],
  null = cox$loglik[1], rows = cox$n, events = cox$nevent
)
# a small table that is in the JSON itself, for tests that need no files: 6 sites, 4 wards each, numbers without a generator
n <- 120
i <- seq_len(n)
small <- data.frame(
  site = paste0("s", (i - 1) %% 6 + 1), ward = paste0("w", ((i - 1) %/% 6) %% 4 + 1),
  x = round(sin(i * 1.7) * 2 + i / 60, 3), age = 40 + (i * 37) %% 41, arm = c("a", "b", "c")[(i + i %/% 6) %% 3 + 1],
  exposure = 1 + (i * 13) %% 5
)
level <- c(1.2, -0.7, 0.3, 2.1, -1.5, 0.1)[(i - 1) %% 6 + 1]
slope <- c(0.5, 0.3, -0.4, 0.1, -0.2, -0.3)[(i - 1) %% 6 + 1]
noise <- cos(i * 2.3) + sin(i * i)
of_ward <- 1.5 * sin(7 * ((i - 1) %% 6) + 3 * (((i - 1) %/% 6) %% 4))
small$y <- round(10 + 2 * level + (1.5 + 2 * slope) * small$x + (small$arm == "b") + of_ward + noise, 3)
small$twice <- 2 * small$x
small$sick <- as.integer(level / 2 + 0.4 * small$x + noise > 0.5)
small$trials <- 5 + (i * 3) %% 4
small$cured <- pmin(small$trials, pmax(0, round(small$trials * plogis(level / 2 + 0.3 * small$x + noise / 2))))
small$count <- round(small$exposure * exp(0.3 + level / 3 + 0.2 * small$x + noise / 3))
small$time <- pmax(1, round(20 * exp(-0.3 * small$x + noise / 2)))
small$event <- as.integer((i * 11) %% 7 > 1)
small$x[c(17, 62)] <- NA
out$table <- lapply(small, I)
formulas <- list(
  small = list("y ~ x * arm + age + (1 + x | site)"),
  small_ml = list("y ~ x + (1 + x || site)", reml = FALSE),
  small_nested = list("y ~ x + arm + (1 + x | site) + (1 | ward)", r = "y ~ x + arm + (1 + x | site) + (1 | site:ward)"),
  small_nested_only = list("y ~ x + (1 | ward)", r = "y ~ x + (1 | site:ward)"),
  small_aliased = list("y ~ x + twice + age + (1 | site)")
)
for (name in names(formulas)) {
  f <- formulas[[name]]
  reml <- !identical(f$reml, FALSE)
  r <- if (is.null(f[["r"]])) f[[1]] else f[["r"]]
  model <- suppressMessages(lmerTest::lmer(as.formula(r), small, REML = reml, control = tight))
  out[[name]] <- c(of_mixed(model, f[[1]], "gaussian", "table", profile = name == "small_ml"), list(reml = reml))
}
larger <- lmer(y ~ x + arm + (1 + x | site), small, REML = FALSE, control = tight)
smaller <- lmer(y ~ x + (1 | site), small, REML = FALSE, control = tight)
test <- anova(smaller, larger)
out$small_anova <- list(chisq = test$Chisq[2], df = test$Df[2], p = test[["Pr(>Chisq)"]][2])
small_counts <- list(
  small_binary = list("sick ~ x + arm + (1 | site)", "binomial"),
  small_slopes = list("cbind(cured, trials - cured) ~ x + (1 + x | site)", "binomial"),
  small_poisson = list("count ~ x + age + offset(log(exposure)) + (1 | site)", "poisson")
)
for (name in names(small_counts)) {
  f <- small_counts[[name]]
  first <- suppressWarnings(glmer(as.formula(f[[1]]), small, f[[2]]))
  start <- list(theta = getME(first, "theta"), fixef = fixef(first))
  model <- suppressWarnings(update(first, start = start, control = control))
  # confint interpolates: near 0, and of correlations of few sites, its ends are some percent off; test_profile.py has those
  out[[name]] <- of_mixed(model, f[[1]], f[[2]], "table", profile = name == "small_poisson")
}
cox <- coxph(Surv(time, event) ~ x + arm + age + strata(site), small, ties = "efron", control = coxph.control(eps = 1e-12, iter.max = 60))
out$small_cox <- list(
  file = "table", formula = "Surv(time, event) ~ x + arm + age", family = "cox", site = "site", terms = names(coef(cox)),
  estimate = unname(coef(cox)), error = unname(sqrt(diag(vcov(cox)))), loglik = cox$loglik[2], null = cox$loglik[1],
  rows = cox$n, events = cox$nevent
)
flat <- glm(sick ~ x + arm, binomial, small, control = glm.control(epsilon = 1e-14))
out$small_glm <- list(
  file = "table", formula = "sick ~ x + arm", family = "binomial", site = "site", terms = names(coef(flat)),
  estimate = unname(coef(flat)), error = unname(sqrt(diag(vcov(flat)))), loglik = as.numeric(logLik(flat)), rows = nobs(flat)
)
write_json(out, arguments[2], digits = NA, auto_unbox = TRUE, pretty = TRUE, na = "null")
